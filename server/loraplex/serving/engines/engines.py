"""The engines as the API sees them: each request goes where it waits least, each adapter lives where `placement` says,
and what a dead engine had goes on elsewhere. One engine is the plain case of many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv.prefix_keys import first_key
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.engine.tenant_terms import DEFAULT_TERMS, TenantTerms
from loraplex.engine.types import AdapterState, EngineError, EngineRequest, Namespace, TokenEvent
from loraplex.serving.engines.choosing import choose_replica
from loraplex.serving.engines.failover import Failover, Group, most_tokens
from loraplex.serving.engines.fairness import EXCHANGE_S, ServiceExchange
from loraplex.serving.engines.handing_over import HandingOver, HandoverCounts
from loraplex.serving.engines.merged import (
    NEAREST,
    Totals,
    answers,
    merge_cache,
    merge_expert_rows,
    merge_info,
    run_all,
    run_some,
)
from loraplex.serving.engines.placing import ROUND_S, Placing
from loraplex.serving.engines.replica import Replica, in_order
from loraplex.serving.engines.reports import ReplicaReport
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineDraining, EngineOverloaded, EngineUnavailable, ServingError
from loraplex.serving.placement.homes import Homes, PlacedVersion

T = TypeVar("T")


class Engines:
    """Submit requests, read their events, abort them; ask and tell the engines of adapters and tenants.

    Replicas that are given start and end with it; others may `join` and `leave`. `num_wanted`: how many there should
    be; None: those that are given. `engines_dial`: whether others may join, so that what has lost its engine waits for
    one. All methods belong to one event loop's thread."""

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        *,
        num_wanted: int | None = None,
        engines_dial: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._groups: dict[str, Group] = {}
        self._terms: dict[str, TenantTerms] = {}
        self._info: EngineInfo | None = None
        self._totals = Totals()
        self._closing = False
        self._past_restarts: dict[str, int] = {}  # of replicas that are away, each one's in all
        self.homes = Homes(clock)
        self.placing = Placing(self.homes)
        self._failover = Failover(self._replicas, self._choose, clock, engines_dial=engines_dial)
        self.handing_over = HandingOver(self._ready, self.homes)
        for replica in replicas:
            self._add(replica)
        self.num_wanted = len(self._replicas) if num_wanted is None else num_wanted
        self.num_managers_lost = 0
        """Processes that start engines, as Ray's manager, which ended or lost their head."""

    # Replicas.

    @property
    def replicas(self) -> Sequence[Replica]:
        """In the order of their names."""
        return [self._replicas[name] for name in sorted(self._replicas)]

    def join(self, replica: Replica) -> None:
        """Take in an engine that is ready."""
        self._add(replica)
        self._info = self.info  # it stays known where the engine leaves at once
        replica.session.set_tenants(self._terms)
        self._failover.look()

    def leave(self, name: str) -> None:
        """Forget an engine that is gone; its session has handed over what it had."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self.handing_over.end(replica)
            self._past_restarts[name] = replica.session.num_restarts

    def drain(self, name: str, draining: bool = True) -> None:
        """Give an engine nothing new from here on, and have it hand its prefixes on; or give it requests again. Raises
        KeyError where this name has none."""
        self._replicas[name].is_draining = draining
        (self.handing_over.begin if draining else self.handing_over.end)(self._replicas[name])

    @property
    def num_failed_over(self) -> int:
        """Sequences that went on with another engine after theirs was lost, since the server began."""
        return self._failover.num_failed_over

    @property
    def num_continued(self) -> int:
        """Those of them whose answer had begun."""
        return self._failover.num_continued

    @property
    def num_moved(self) -> int:
        """Adapters that began to move to another engine without need."""
        return self.homes.num_moved

    @property
    def handovers(self) -> HandoverCounts:
        """Prefixes of drained engines."""
        return self.handing_over.counts

    def reports(self) -> list[ReplicaReport]:
        """The engines, by name."""
        return [replica.report() for replica in self.replicas]

    def placed(self, limit: int, after: str = "") -> list[PlacedVersion]:
        """The first `limit` versions with a place whose digest comes after this one, by digest."""
        return self.homes.placed(limit, after)

    async def replica_stats(self) -> dict[str, EngineStats]:
        """The figures of each engine that is up, by name. Raises ServingError where none is, or one does not answer."""
        return await self._ask_all(lambda replica: replica.session.stats())

    def _add(self, replica: Replica) -> None:
        replica.session.take_over = partial(self._take_over, replica)
        replica.session.lives_here = partial(self._lives_at, replica)
        replica.session.on_leaving = partial(self.handing_over.begin, replica)
        self._replicas[replica.id] = replica

    def _lives_at(self, replica: Replica, digest: str) -> bool:
        return self._home(digest, self._replicas.values()) is replica

    def _home(self, digest: str, replicas: Iterable[Replica]) -> Replica | None:
        """The first of these replicas where a version lives, or would."""
        order, named = in_order(digest, replicas), self.homes.staying(digest)
        return next((replica for replica in order if replica.id in named), order[0] if order else None)

    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.state == "ready"]

    def _unavailable(self) -> EngineUnavailable:
        if self._closing:
            return EngineDraining("the server is shutting down")
        error = EngineUnavailable(self.unhealthy_reason or "the engine is not ready")
        if self._replicas:
            error.retry_after_s = min(replica.session.retry_after_s for replica in self._replicas.values())
        return error

    # Health.

    @property
    def info(self) -> EngineInfo:
        """Known once `start` has returned, also while engines are being replaced."""
        known = []
        for replica in self._replicas.values():
            try:
                known.append(replica.session.info)
            except EngineUnavailable:
                continue  # it has not been up yet
        if known:
            self._info = known[0] if len(known) == 1 else merge_info(known)
        if self._info is None:
            raise EngineUnavailable("the engine has not been started")
        return self._info

    @property
    def healthy(self) -> bool:
        """Whether requests are taken now."""
        return any(replica.state == "ready" for replica in self._replicas.values())

    @property
    def unhealthy_reason(self) -> str | None:
        if self.healthy:
            return None
        reasons = [replica.session.unhealthy_reason or "the engine is draining" for replica in self.replicas]
        return next(iter(reasons), "no engine has joined")

    @property
    def num_restarts(self) -> int:
        now = {name: replica.session.num_restarts for name, replica in self._replicas.items()}
        return sum((self._past_restarts | now).values())

    @property
    def num_live(self) -> int:
        """Requests that have not ended, without those in the background."""
        live = (replica.session.num_live for replica in self._replicas.values())
        return self._failover.num_waiting + sum(live)

    async def start(self) -> None:
        """Return when the engines can take requests. Raises EngineStartError with one clear line."""
        await run_all(replica.session.start() for replica in self._replicas.values())

    async def place_adapters(self) -> None:
        """Run rounds of placement without end."""
        while True:
            await asyncio.sleep(ROUND_S)
            await self.placing.round(self._ready())

    async def exchange_service(self) -> None:
        """Tell each engine what the others serve its tenants, without end."""
        exchange = ServiceExchange()
        while True:
            await asyncio.sleep(EXCHANGE_S)
            await exchange.exchange(self._healthy())

    async def close(self, *, drain_s: float = 0) -> None:
        """Take nothing new, let what runs finish within `drain_s` seconds, end the rest, stop the engines."""
        self._closing = True
        self.handing_over.close()
        self._failover.end(EngineError("draining", "the server shut down before it ended"))
        await run_all(replica.session.close(drain_s=drain_s) for replica in self._replicas.values())

    # Requests.

    def submit(self, *requests: EngineRequest, terms: TenantTerms | None = None) -> list[RequestStream]:
        """All of these requests of one tenant and adapter, or none; by these `terms` of the tenant from now on. Raises
        EngineOverloaded at the bound on requests in flight, EngineUnavailable (EngineDraining) where no engine takes
        requests, ValueError for an id that is live already."""
        if self._closing:
            raise EngineDraining("the server is shutting down")
        if terms is not None:
            self.set_tenants({requests[0].tenant_id: terms})
        if any(request.request_id in self._groups for request in requests):
            raise ValueError(f"request id {requests[0].request_id} is live already")
        ready = self._ready()
        if not ready:
            raise self._unavailable()
        replica, streams = self._submit_to(ready, requests)
        group = Group(streams, requests, replica, self._clock())
        for stream in streams:
            self._groups[stream.request.request_id] = group
            stream.on_end = self._on_end
        ref = requests[0].adapter
        if ref is not None and not requests[0].background:
            self.homes.begin(ref, len(streams))
        return streams

    def _submit_to(
        self, ready: Sequence[Replica], requests: Sequence[EngineRequest]
    ) -> tuple[Replica, list[RequestStream]]:
        """Where it waits least; one that is full leaves it to the least loaded one."""
        chosen = self._choose(ready, requests[0])
        try:
            return chosen, chosen.session.submit(*requests)
        except EngineOverloaded:
            others = [replica for replica in ready if replica is not chosen]
            if not others:
                raise
            least = min(others, key=lambda replica: (replica.session.num_live, replica.id))
            return least, least.session.submit(*requests)

    def _choose(self, ready: Sequence[Replica], request: EngineRequest) -> Replica:
        """Where the prompt's first KV block would be. One of an activated adapter that acts later is the base's: such a
        request goes with the conversation on the base, and has its adapter loaded there."""
        if len(ready) == 1:
            return ready[0]
        most = most_tokens(request)
        # The context may follow the memory that an engine found.
        ready = [replica for replica in ready if replica.session.info.max_model_len >= most] or ready
        (_, digest), link = first_key(request)
        if request.max_load is not None and request.adapter is not None:
            digest = request.adapter.digest  # it must not wait for a load, wherever its first block is
        return choose_replica(ready, self.homes, digest, link)

    def _on_end(self, stream: RequestStream, event: TokenEvent) -> None:
        group = self._groups.pop(stream.request.request_id)
        timing, ref = event.timing, stream.request.adapter
        if stream.request.background:
            return
        if event.finish_reason in ("stop", "length") and timing is not None:
            group.replica.ended(timing.total_s)
        if ref is not None:
            self.homes.end(ref.digest, None if timing is None else timing.adapter_s)

    def _take_over(
        self, replica: Replica, streams: Sequence[RequestStream], error: EngineError
    ) -> Collection[RequestStream]:
        """Take over streams of this replica, as `TakeOver` says."""
        if self._closing:
            return ()
        lost: dict[Group, list[RequestStream]] = {}
        given_up = [stream for stream in streams if stream.aborted]
        for stream in given_up:
            stream.put(TokenEvent(stream.request.request_id, finish_reason="abort"))
        for stream in streams:
            group = self._groups.get(stream.request.request_id)  # None: it has ended, or is a measurement
            if group is not None:
                lost.setdefault(group, []).append(stream)
        return [*given_up, *self._failover.take(replica, lost, error)]

    # Tenants.

    @property
    def served_tenants(self) -> set[str]:
        """The tenants with a request that has not ended."""
        return set().union(*(replica.session.served_tenants for replica in self._replicas.values()))

    def set_tenants(self, terms: Mapping[str, TenantTerms]) -> None:
        """Serve these tenants by these terms from now on, also what is here already, on engines that come later too.
        Costs nothing where they are as before. `lifecycle.tenant_terms` reads them from the database."""
        for tenant_id, its in terms.items():
            if its == DEFAULT_TERMS:
                self._terms.pop(tenant_id, None)
            else:
                self._terms[tenant_id] = its
        for replica in self._replicas.values():
            replica.session.set_tenants(terms)

    # Adapters.

    def adapter_state(self, digest: str) -> AdapterState:
        """Where the version was a moment ago; a hint. The truth is in a request's first event."""
        states = (replica.session.adapter_state(digest) for replica in self._replicas.values())
        return min(states, key=NEAREST.__getitem__, default="cold")

    @property
    def resident(self) -> dict[str, AdapterState]:
        """The versions in memory a moment ago, by digest."""
        found: dict[str, AdapterState] = {}
        for replica in self._replicas.values():
            for digest, state in replica.session.resident.items():
                found[digest] = min(state, found.get(digest, state), key=NEAREST.__getitem__)
        return found

    @property
    def pins(self) -> Mapping[str, AdapterRef]:
        """The versions that were pinned, by digest; also while no engine is up."""
        return self.homes.pins

    async def stats(self) -> EngineStats:
        lives = {name: replica.life for name, replica in self._replicas.items()}
        found = await self.replica_stats()
        return self._totals.merge({lives[name]: its for name, its in found.items() if name in lives})

    async def cache(self, digests: Collection[str] | None = None) -> list[CacheEntry]:
        """The versions of `digests` that an engine knows; None: all of them, which thousands make slow."""
        return merge_cache(await self._ask_all(lambda replica: replica.session.cache(digests)))

    async def expert_rows(self) -> dict[int, tuple[int, ...]]:
        """The rows that went to each expert, by layer, since the engines began; empty of a model without routers."""
        return merge_expert_rows(await self._ask_all(lambda replica: replica.session.expert_rows()))

    async def prefix_owners(self, after: Namespace | None) -> set[Namespace]:
        return set().union(*(await self._ask_all(lambda each: each.session.prefix_owners(after))).values())

    async def pin(self, ref: AdapterRef) -> None:
        """Keep this version on a device; it comes back after a restart. Raises ServingError where the engines refuse.
        Returns when one has noted it, which may be before it is loaded."""
        ready = self._ready()
        if not ready:
            raise self._unavailable()
        refusal: ServingError | None = None
        self.homes.pins[ref.digest] = ref  # a round that finds a pin which is not there takes it away
        for replica in in_order(ref.digest, ready):
            try:
                await replica.session.pin(ref)
            except ServingError as error:
                refusal = error
            else:
                return
        assert refusal is not None
        self.homes.pins.pop(ref.digest, None)
        raise refusal

    async def unpin(self, digest: str) -> None:
        self.homes.pins.pop(digest, None)
        having = [replica for replica in self._replicas.values() if digest in replica.session.pins]
        await run_some(replica.session.unpin(digest) for replica in having or self._replicas.values())

    async def drop(self, digest: str) -> None:
        """Forget a version that was deleted; what runs on it finishes."""
        self.homes.forget(digest)
        self.handing_over.erase(digest)
        await run_some(replica.session.drop(digest) for replica in self._replicas.values())

    async def forget_tenant(self, tenant_id: str) -> None:
        self.handing_over.erase(tenant_id)
        await run_some(replica.session.forget_tenant(tenant_id) for replica in self._replicas.values())

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        """Bring these versions nearer, in their order, as far as there is free room: a hint that they will be asked."""
        self._deal(refs, lambda replica, its: replica.session.prefetch(its))

    def warm(self, refs: Sequence[AdapterRef]) -> None:
        """Load these in place of those of the last call, behind all that requests wait for: a hint, as `prefetch`."""
        self._deal(refs, lambda replica, its: replica.session.warm(its))

    def _deal(
        self, refs: Sequence[AdapterRef], tell: Callable[[Replica, Sequence[AdapterRef]], None]
    ) -> None:
        """Tell each replica of the versions that live there, in their order."""
        dealt: dict[Replica, list[AdapterRef]] = {}
        ready = self._ready()
        for ref in refs:
            home = self._home(ref.digest, ready)
            if home is not None:
                dealt.setdefault(home, []).append(ref)
        for replica, its in dealt.items():
            tell(replica, its)

    @property
    def warming(self) -> bool:
        """Whether loads of `warm`, or of a restart, go on."""
        return any(replica.session.warming for replica in self._replicas.values())

    async def wait_pins(self, refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        """Return when no pinned version is on its way to a device, or after some seconds: those of `refs` that are not
        there, since another one waits for them, they failed, or were unpinned meanwhile. Raises EngineUnavailable."""
        by_replica = {
            replica: [ref for ref in refs if ref.digest in replica.session.pins]
            for replica in self._healthy()
        }
        if not by_replica:
            raise self._unavailable()
        found = await asyncio.gather(*(replica.session.wait_pins(its) for replica, its in by_replica.items()))
        return [entry for entries in found for entry in entries]

    async def measure_sites(self, ref: AdapterRef) -> SiteOutputs:
        """Measure the outputs of this version's sites for the fixed probes, before all else of the tenant that waits.
        It is loaded as for any request, within the limits of memory that the engine knows; where that fails, the
        outputs say so. Raises ServingError: EngineUnavailable and EngineOverloaded where it makes sense to try again,
        EngineLost where the engine died meanwhile, MeasureFailed with the engine's code else."""
        replica = self._home(ref.digest, self._ready())
        if replica is None:
            raise self._unavailable()
        return await replica.session.measure_sites(ref)

    def _healthy(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.session.healthy]

    async def _ask_all(self, ask: Callable[[Replica], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """The answers of the engines that are up, by name, as `answers` gives them. Raises ServingError where there is
        none."""
        healthy = self._healthy()
        if not healthy:
            raise self._unavailable()
        return await answers({replica.id: ask(replica) for replica in healthy})
