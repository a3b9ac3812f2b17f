"""A server that speaks S3 over HTTP, moto's, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import obstore
from obstore.store import S3Store

from support.waiting import eventually

BUCKET = "loraplex-tests"


@dataclass(frozen=True)
class S3Server:
    port: int

    def variables(self, port: int | None = None) -> dict[str, str]:
        """What a client needs in its environment; `port` is a proxy's."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def store(self, prefix: str | None = None) -> S3Store:
        return S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id="testing",
            secret_access_key="testing",
            region="us-east-1",
            client_options={"allow_http": True},
        )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """With an empty bucket BUCKET."""
    code = (
        "from moto.server import ThreadedMotoServer; import signal; "
        "s = ThreadedMotoServer('127.0.0.1', 0, verbose=False); s.start(); "
        "print(s.get_host_and_port()[1], flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        server = S3Server(int(process.stdout.readline()))
        eventually(lambda: httpx.put(f"http://127.0.0.1:{server.port}/{BUCKET}").status_code == 200)
        obstore.put(server.store(), "probe", b"")
        obstore.delete(server.store(), "probe")
        yield server
    finally:
        process.kill()
        process.wait()
