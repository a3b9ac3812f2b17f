"""A TCP proxy of the loopback address that can stop carrying: what a network does that neither delivers nor refuses."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time


class TcpProxy:
    """Carries between its own `port` and `target`, which may be set for the next connections. While `hang` is in force
    it takes connections and bytes, and passes nothing on in either direction. `delay_s` is kept before each piece.
    `resets` are connections that are reset after `reset_after` bytes of their answers. A context manager."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.delay_s = 0.0
        self.resets = 0
        self.reset_after = 0
        self.num_reset = 0
        self._carries = threading.Event()
        self._carries.set()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def hang(self) -> None:
        self._carries.clear()

    def carry(self) -> None:
        self._carries.set()

    def __enter__(self) -> TcpProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._carries.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            self._wait_carrying()
            with socket.create_connection(("127.0.0.1", self.target), timeout=60) as server:
                other = {client: server, server: client}
                left = self._budget()
                while not self._closed.is_set():
                    ready, _, _ = select.select(list(other), [], [], 0.05)
                    self._wait_carrying()
                    for end in ready:
                        data = end.recv(65536)
                        if not data:
                            return
                        time.sleep(self.delay_s)
                        if end is server and left is not None:
                            left -= len(data)
                            if left < 0:
                                client.setsockopt(
                                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                                )
                                self.num_reset += 1
                                return
                        other[end].sendall(data)

    def _budget(self) -> int | None:
        if self.resets <= 0:
            return None
        self.resets -= 1
        return self.reset_after

    def _wait_carrying(self) -> None:
        while not self._carries.wait(0.05) and not self._closed.is_set():
            pass
