"""The S3 server that the tests of sources and stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.s3_server import S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server
