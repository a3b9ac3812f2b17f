"""Connections that strangers may open: uvicorn's HTTP protocol, bounded before anybody is known.

uvicorn's protocol on httptools waits without a limit for a request's head, keeps as many bytes of it as are sent,
queues as many pipelined requests as fit into a connection's time, and closes a connection only when its peer has read
all that was written. Each of these is a way for a client without a key to take all memory or all file descriptors.

It also takes the body of a request that asks for an upgrade (`Upgrade: h2c`, as Java's client does on every new
connection) for the next request: a way to smuggle one past a proxy, and a loss of the body for an honest client. Here a
request to upgrade is ignored, as RFC 9110 (7.8) allows.

Of pipelined requests it tells only the last one that the client has gone, and what it refuses it writes into the answer
that is being sent. Here each is told, and the refusal comes behind the answers before it.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.app.ports.host import wrong_host
from loraplex.http.unread import unread_bytes

RESERVED_FILES = 512
"""File descriptors that no connection of the data plane may take: the admin plane, the database, uploads."""
ADMIN_CONNECTIONS = 256
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes and seconds. `head_bytes` bounds what is read without an end of a head, a trailer or a chunk's header;
    `head_s` is what a head may take from its connection's or its own first byte; `linger_s` is how long a client may
    read nothing of an answer that is complete."""

    head_bytes: int = 32 << 10
    headers: int = 128
    pipelined: int = 8
    head_s: float = 30.0
    linger_s: float = 30.0


class ConnectionTable:
    """A table of at most `limit` connections. If one more comes, the one that has been without a request longest is
    closed; so a client that only holds connections open keeps no other out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[BoundedProtocol] = set()
        self._idle: OrderedDict[BoundedProtocol, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: BoundedProtocol) -> bool:
        """False where it can't be had: all others are busy with requests."""
        if len(self._open) >= self._limit:
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            self.closed(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def idle(self, connection: BoundedProtocol, idle: bool) -> None:
        """Whether it is without a request now."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def closed(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


_INVALID = "Invalid HTTP request received."


class _Refused(Exception):
    """Raised inside the parser: nothing more of this connection is read."""


# Private: uvicorn documents that a protocol class may be given to it, not what its own consist of. It has no options
# for any of these bounds, and a protocol written from the start would repeat all of its flow control and pipelining.
class BoundedProtocol(HttpToolsProtocol):
    """One connection within `bounds`, listed in `table`."""

    def __init__(self, *args: Any, table: ConnectionTable, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None
        self._too_large = False
        self._head_complete = True
        self._resuming = False  # a second parser gets the head of a message that the first had begun
        self._head_bytes = 0
        self._head_count = 0
        self._fruitless = 0  # bytes since the parser last completed anything
        self._fruitful = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._fault = _INVALID  # what a refusal says
        self._refusal: str | None = None  # what is sent behind the answers to them
        self._unread: int | None = None  # of an answer that is complete, when this was last looked at

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if self._table.opened(self):
            self._start_timer(self._bounds.head_s)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._table.closed(self)
        super().connection_lost(exc)
        for cycle in self._unanswered:
            _tell_that_client_has_gone(cycle)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._fruitful = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            # Without a line in the log: any stranger could write as many there as it likes.
            self.send_400_response(self._fault)
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._fruitless = 0 if self._fruitful else self._fruitless + len(data)
        if self._fruitless > self._bounds.head_bytes:
            self._too_large = True
            self.send_400_response("")
        elif self._is_idle and self._timer is None:
            # Also for what remains of a body whose request was answered early: it must end.
            self._start_timer(self._bounds.head_s)

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser leaves the rest to another protocol; there is none, so another parser goes on with it.
                data = data[upgrade.args[0] :]
                framing = b"".join(b"%s: %s\r\n" % field for field in self.headers if field[0] in _FRAMING)
                head = b"%s / HTTP/1.1\r\n%s\r\n" % (self.parser.get_method(), framing)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._resuming = True
                self.parser.feed_data(head)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # The parser's side.

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        super().on_message_begin()
        self._head_complete = False
        self._head_bytes = self._head_count = 0

    def on_url(self, url: bytes) -> None:
        if self._resuming:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resuming:
            return
        self._head_count += 1
        self._count(len(name) + len(value))
        # A trailer comes behind the body, when what the headers say has been looked at and believed.
        if not self._head_complete:
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._bounds.head_bytes or self._head_count > self._bounds.headers:
            self._too_large = True
            raise _Refused

    def on_headers_complete(self) -> None:
        if self._resuming:
            self._resuming = False
            return
        version = self.parser.get_http_version()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        # What this parser and a proxy before it might understand in two ways is not understood at all.
        if version not in ("1.0", "1.1") or (codings and (codings != [b"chunked"] or version == "1.0")):
            raise _Refused
        if (fault := wrong_host(version, self.url, self.headers)) is not None:
            self._fault = fault
            raise _Refused
        if len(self.pipeline) >= self._bounds.pipelined:
            raise _Refused
        self._head_complete = self._fruitful = True
        self._head_bytes = self._head_count = 0
        self._stop_timer()
        self._table.idle(self, False)
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._fruitful = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fruitful = True
        if self.parser.should_upgrade():  # its body comes yet, through the next parser
            return
        super().on_message_complete()

    # Ends.

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._refusal is not None and not self._unanswered and not self.transport.is_closing():
            self.send_400_response(self._refusal)
        elif self.transport.is_closing():
            self._start_timer(self._bounds.linger_s)
        elif self._is_idle:
            self._table.idle(self, True)
            if not self._head_complete:  # some of the next one has come already
                self._start_timer(self._bounds.head_s)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        """A head that is no HTTP, or is too large. Not in a plane's shape: the plane is not known yet."""
        if self._unanswered and self._unanswered[-1].more_body:  # what is wrong is in its body
            broken = self._unanswered.pop()
            _tell_that_client_has_gone(broken)
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()
            if broken.response_started:
                self._close()
                return
        if self._unanswered:
            self._refusal = msg
            return
        if self._too_large:
            text = b"The request's head is too large."
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(text), text)
            )
            self._close()
        else:
            super().send_400_response(msg)
        self._start_timer(self._bounds.linger_s)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        if self.transport.get_write_buffer_size():
            self._start_timer(self._bounds.linger_s)

    def _on_time(self) -> None:
        # With the kernel's queue: it takes nothing from here before a third of its megabytes has been read.
        left = unread_bytes(self.transport)
        if left and (self._unread is None or left < self._unread):
            self._unread = left
            self._start_timer(self._bounds.linger_s)
        else:
            # `close` would wait until the peer has read what was written.
            self.transport.abort()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _tell_that_client_has_gone(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def bounded_protocol(table: ConnectionTable, bounds: Bounds | None = None) -> Callable[..., BoundedProtocol]:
    """The protocol factory for uvicorn."""
    chosen = bounds or Bounds()

    def make(*args: Any, **kwargs: Any) -> BoundedProtocol:
        return BoundedProtocol(*args, table=table, bounds=chosen, **kwargs)

    return make


def raise_open_files() -> int:
    """Take as many file descriptors as this process may have. Returns how many connections fit into them beside
    what else needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = most if soft == resource.RLIM_INFINITY else soft
    return max(64, files - RESERVED_FILES)
