"""`loraplex` with a slower first token of one version: `python slow_serve.py VERSION PART serve …`.

The first token of a version's answers waits for PART of the time that it took, 0.2 for a fifth.
"""

from __future__ import annotations

import asyncio
import sys
import time

from loraplex.engine.ipc.protocol import TokenEvent
from loraplex.serving.client.engine_client import RequestStream


def slow_down(version: int, part: float) -> None:
    began: dict[str, float] = {}
    init, read = RequestStream.__init__, RequestStream.__anext__

    def note(self: RequestStream, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        adapter = self.request.adapter
        if adapter is not None and adapter.version == version:
            began[self.request.request_id] = time.monotonic()

    async def wait(self: RequestStream) -> TokenEvent:
        event = await read(self)
        at = began.pop(self.request.request_id, None)
        if at is not None:
            await asyncio.sleep(part * (time.monotonic() - at))
        return event

    RequestStream.__init__ = note  # type: ignore[method-assign]
    RequestStream.__anext__ = wait  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]))
    from loraplex.app.cli import main

    del sys.argv[1:3]
    main()
