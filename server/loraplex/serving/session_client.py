"""What an engine client passes on to its session, which is the same whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.protocol import CacheEntry, EngineInfo, EngineStats
from loraplex.engine.types import AdapterState, EngineRequest
from loraplex.serving.client import RequestStream
from loraplex.serving.errors import EngineUnavailable
from loraplex.serving.session import EngineSession


class SessionClient(ABC):
    """The half of an `EngineClient` that does not depend on where the engine runs. Calls raise EngineUnavailable
    while it is not `healthy`; hints do nothing then."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._info: EngineInfo | None = None

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @abstractmethod
    def _unavailable(self) -> EngineUnavailable:
        """Why it is not healthy, as the answer to a call."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine has not been started")
        return self._info

    @property
    def num_live(self) -> int:
        return self._session.num_live

    def _submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        self._check()
        # Twice what the engine takes: one tenant, who may have half, can fill it, and another still comes in. Whom to
        # refuse in a full queue is the engine's to say.
        return self._session.submit(
            requests, max_inflight=2 * (self.info.max_waiting + self.info.max_num_seqs)
        )

    def adapter_state(self, digest: str) -> AdapterState:
        return self._session.adapter_state(digest)

    async def stats(self) -> EngineStats:
        self._check()
        return await self._session.stats()

    async def cache(self) -> list[CacheEntry]:
        self._check()
        return await self._session.cache()

    async def pin(self, ref: AdapterRef) -> None:
        self._check()
        await self._session.pin(ref)

    async def unpin(self, digest: str) -> None:
        """An engine that is away comes back without the pin; EngineUnavailable is raised all the same."""
        self._session.forget_pin(digest)
        self._check()
        await self._session.unpin(digest)

    async def drop(self, digest: str) -> None:
        """As `unpin`."""
        self._session.forget_pin(digest)
        self._check()
        await self._session.drop(digest)

    async def ping(self) -> None:
        """Returns when the step thread has answered between two steps."""
        self._check()
        await self._session.ping()

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        if refs and self.healthy:
            self._session.prefetch(refs)

    @property
    def weights(self) -> dict[str, float]:
        return self._session.weights

    def set_weights(self, weights: Mapping[str, float]) -> None:
        if self.healthy:
            self._session.set_weights(weights)

    def _check(self) -> None:
        if not self.healthy:
            raise self._unavailable()
