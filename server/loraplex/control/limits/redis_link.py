"""One connection to Redis that many callers use at once, and that is given up as soon as it is late."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

TAG = "{loraplex}"
"""All keys begin with it, so that in a cluster all lie in one slot and a script may use them together."""
CONNECT_TIMEOUT_S = 1.0
MOST_MOVES = 3
LATE_S = 0.01
"""A time-out that fires this much too late is due to our own event loop, not to Redis."""
log = structlog.get_logger("loraplex")


def redis_script() -> str:
    """The Lua that decides, which lies beside this file."""
    return (importlib.resources.files(__package__) / "redis_limiter.lua").read_text()


class LinkDown(Exception):
    """No answer from Redis, or none that can be used. Whether what was asked for was done is not known."""


class _Moved(LinkDown):
    """Another node of the cluster has the slot; the next connection goes there."""


@dataclass(eq=False, slots=True)
class _Wire:
    """A connection and, in the order of their calls, the waiters for its answers."""

    connection: AbstractConnection
    waiting: deque[asyncio.Future[Any]] = field(default_factory=deque)


class RedisLink:
    """Calls of one Lua script over one connection, each written at once and answered in order: no call waits for
    another's answer, and what is called first is done first. Only `connect` connects; a call without a connection
    fails at once. In a cluster it follows the slot of `TAG` from node to node.

    For one event loop. `connect` and `call` raise LinkDown.
    """

    def __init__(self, url: str, script: str) -> None:
        """`url`: redis://, rediss:// or unix://. Raises ValueError for another one."""
        # RESP 2 needs no greeting; time is kept here, over a whole call.
        self._pool = ConnectionPool.from_url(url, protocol=2, socket_timeout=None)
        self._home = {name: self._pool.connection_kwargs.get(name) for name in ("host", "port")}
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._wire: _Wire | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """A fresh connection to a server that has the script, and in a cluster the slot."""
        for _ in range(MOST_MOVES):
            await self._connect()
            with contextlib.suppress(_Moved):
                await self._send(CONNECT_TIMEOUT_S, "EXISTS", f"{TAG}:born")
                return
        raise LinkDown("the nodes of the cluster name each other for the slot of the limits")

    async def _connect(self) -> None:
        await self.close()
        connection: AbstractConnection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            self._pool.connection_kwargs.update(self._home)
            await connection.disconnect(nowait=True)
            raise LinkDown(_reason(error)) from error
        self._wire = _Wire(connection)
        self._reader = asyncio.create_task(self._read(self._wire))
        await self._send(CONNECT_TIMEOUT_S, "SCRIPT", "LOAD", self._script)

    async def call(self, operation: str, given: bytes, timeout_s: float) -> bytes:
        """The script's answer. The call is written before this yields to the event loop for the first time, so that
        calls are done in the order of their beginning."""
        try:
            answer: bytes = await self._send(timeout_s, "EVALSHA", self._sha, "1", TAG, operation, given)
        except NoScriptError:  # the scripts were flushed
            answer = await self._send(timeout_s, "EVAL", self._script, "1", TAG, operation, given)
        return answer

    async def close(self) -> None:
        if self._wire is not None:
            await self._drop(self._wire, "the connection was closed")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def _send(self, timeout_s: float, *command: str | bytes) -> Any:
        """NoScriptError is for the caller."""
        wire = self._wire
        if wire is None:
            raise LinkDown("there is no connection")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        wire.waiting.append(answer)
        try:
            await self._exchange(wire, answer, command, timeout_s)
            return answer.result()
        except NoScriptError:
            raise
        except TimeoutError as error:
            await self._drop(wire, f"no answer within {timeout_s * 1000:.0f} ms")
            raise LinkDown(f"no answer within {timeout_s * 1000:.0f} ms") from error
        except MovedError as error:
            self._pool.connection_kwargs.update(host=error.host or self._home["host"], port=error.port)
            raise _Moved(_reason(error)) from error
        except (RedisError, OSError) as error:
            raise LinkDown(_reason(error)) from error
        finally:
            answer.cancel()

    async def _exchange(
        self, wire: _Wire, answer: asyncio.Future[Any], command: tuple[str | bytes, ...], timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        packed = wire.connection.pack_command(*command)
        try:
            async with asyncio.timeout_at(end):
                await wire.connection.send_packed_command(packed, check_health=False)
                await asyncio.wait({answer})
        except TimeoutError:
            if loop.time() - end < LATE_S:
                raise
            # This process was held up: what came meanwhile has not been looked at.
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({answer})

    async def _read(self, wire: _Wire) -> None:
        """Read answers and pass them to the waiters, until the connection breaks."""
        try:
            while True:
                result: Any = None
                refusal: ResponseError | None = None
                try:
                    result = await wire.connection.read_response(
                        disable_decoding=True, disconnect_on_error=False
                    )
                except ResponseError as error:
                    refusal = error
                answer = wire.waiting.popleft()
                if answer.done():
                    continue
                if refusal is not None:
                    answer.set_exception(refusal)
                else:
                    answer.set_result(result)
        except Exception as error:
            if not isinstance(error, RedisError | OSError | IndexError):
                log.error("limiter_redis_unreadable", exc_info=error)
            await self._drop(wire, _reason(error))  # else all waiters would never end

    async def _drop(self, wire: _Wire, reason: str) -> None:
        if self._wire is wire:
            self._wire = None
        waiting, wire.waiting = wire.waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(LinkDown(reason))
        await wire.connection.disconnect(nowait=True)


def _reason(error: Exception) -> str:
    """The first line, or the kind of error where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
