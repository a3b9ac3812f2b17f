"""A child process that is always waited for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence


class Child:
    """From its spawn to its exit. It is in a process group of its own: a Ctrl-C at the terminal is the parent's to
    handle. `pass_fds` are open in it too. `env` is its environment; None: the parent's. Raises OSError where it cannot
    be spawned. Call from one event loop's thread only."""

    def __init__(
        self, command: Sequence[str], pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The status, negative for a signal."""
        # A fork and exec, about a millisecond; the command is the operator's own.
        self._popen = subprocess.Popen(  # noqa: S603
            list(command), stdin=subprocess.PIPE, process_group=0, pass_fds=pass_fds, env=env
        )
        threading.Thread(target=self._reap, name="child-reaper", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def tell(self, data: bytes) -> None:
        """All that it ever reads on its standard input, less than a pipe's buffer; a dead one hears nothing."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:
            stdin.write(data)

    def signal(self, number: int) -> None:
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(number)

    async def wait_exit(self, timeout_s: float) -> bool:
        """Whether it has exited within the time."""
        await asyncio.wait([self.exited], timeout=timeout_s)
        return self.exited.done()

    async def kill(self, timeout_s: float) -> bool:
        """SIGKILL, which ends a stopped process too. Whether it has exited within the time: one that waits for a
        device that does not answer cannot be ended by anybody."""
        self.signal(signal.SIGKILL)
        exited = await self.wait_exit(timeout_s)
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        return exited

    def _reap(self) -> None:
        """In a thread of its own, as only wait() reports an exit on every platform and event loop."""
        status = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: there is no listener
            self._loop.call_soon_threadsafe(self.exited.set_result, status)
