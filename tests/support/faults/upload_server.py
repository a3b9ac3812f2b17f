"""An admin plane in a process of its own, to be killed: `python upload_server.py ROOT` prints its port."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from support.http.admin_plane import AdminPlane

if __name__ == "__main__":
    plane = AdminPlane(Path(sys.argv[1]))
    report = plane.services.artifacts.sweep()
    server = uvicorn.Server(uvicorn.Config(plane.app, port=0, log_level="critical", ws="none"))
    listener = server.config.bind_socket()
    listener.listen()  # who knows the port may connect at once
    print(listener.getsockname()[1], report.staging_removed, flush=True)
    server.run(sockets=[listener])
