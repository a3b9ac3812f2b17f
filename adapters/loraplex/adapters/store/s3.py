"""A client of a bucket by S3's protocol. Endpoint, region and credentials are in the `AWS_*` variables."""

from __future__ import annotations

import os
from datetime import timedelta

from obstore.store import S3Store

CONNECT_S = 5.0


def s3_store(bucket: str, prefix: str, *, request_s: float, retries: int, retry_s: float) -> S3Store:
    """`request_s`: after these seconds a request is given up; it is repeated `retries` times, within `retry_s` seconds.
    Plain HTTP is spoken only with AWS_ALLOW_HTTP=true."""
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={
            "connect_timeout": timedelta(seconds=min(CONNECT_S, request_s)),
            "timeout": timedelta(seconds=request_s),
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        },
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)},
    )
