"""The engine core between a fake runner and a fake transport, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.kv.handed_blocks import PrefixForm
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from support.engine.fake_runner import FakeRunner, reference
from support.engine.fake_transport import FakeTransport, make_cache
from support.fake_block_disk import BlockDisk
from support.fake_host_memory import BLOCK_BYTES
from support.simulator.core_integrity import check_core, is_named

VOCAB_SIZE = 997
EOS = 0
FORM = "form"
"""Of all blocks of these engines."""


class CoreEngine:
    """`core`, the events that it gave, and a clock that stands still between steps."""

    def __init__(
        self,
        *,
        num_pages: int = 4,
        num_slots: int = 4,
        host_pages: int = 64,
        bound: StepBound | None = None,
        disk: BlockDisk | None = None,
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.transport = FakeTransport(lambda: self.now, num_pages)
        self.cache = make_cache(self.transport, num_slots=num_slots, host_pages=host_pages)
        sizes = SchedulerConfig(64, 512, 16, 64, 100, adapter_wait_aging_s=5.0)
        self.config = replace(sizes, **config)
        self.runner = FakeRunner(
            self.config.num_blocks,
            self.transport.mark_in_slot,
            VOCAB_SIZE,
            max_in_flight=1 + self.config.lookahead,
            is_live=lambda row: self.core._tracker.sequence(row) is not None,
            num_states=self.config.num_states,
            num_windows=self.config.num_windows,
            is_named=lambda state: is_named(self.core, state),
            num_host_blocks=self.config.num_host_blocks,
            most_restored=self.config.most_restored_blocks,
            state_slots=self.config.state_slots,
        )
        self.core = EngineCore(
            self.config,
            self.runner,
            self.cache,
            eos_ids=frozenset({EOS}),
            clock=lambda: self.now,
            bound=bound,
            disk=None if disk is None else disk.open(self.runner.host, lambda: self.now),
            prefixes=PrefixForm(FORM, BLOCK_BYTES),
        )
        self.runner.host.hand = self.core.handover.put
        self.events: list[TokenEvent] = []

    def add(
        self,
        name: str,
        adapter: AdapterRef | None = None,
        *,
        memory: MemoryLimits | None = None,
        **changes: Any,
    ) -> EngineRequest:
        sampling = {
            key: changes.pop(key) for key in list(changes) if key in SamplingParams.__dataclass_fields__
        }
        values: dict[str, Any] = {"tenant_id": "acme", "prompt_ids": tuple(range(1, 21)), **changes}
        request = EngineRequest(
            name, sampling=SamplingParams(**{"max_tokens": 5, **sampling}), adapter=adapter, **values
        )
        if memory is not None:
            self.core.set_terms(request.tenant_id, TenantTerms(memory=memory))
        self.core.add_request(request)
        return request

    def step(self, seconds: float = 0.0) -> list[TokenEvent]:
        self.now += seconds
        self.transport.settle()
        events = self.core.step()
        check_core(self.core)
        assert not self.runner.complaints, self.runner.complaints
        self.events += events
        return events

    def run(self) -> list[TokenEvent]:
        """Until nothing is left to do; returns every event so far."""
        for _ in range(1000):
            if not self.core.has_work:
                return self.events
            self.step(0.01)
        raise AssertionError("the core does not come to an end")

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events if event.request_id == name for token in event.token_ids]

    def end(self, name: str) -> TokenEvent:
        (event,) = (e for e in self.events if e.request_id == name and e.finish_reason is not None)
        return event

    def error(self, name: str) -> str:
        error = self.end(name).error
        assert error is not None
        return error.code


def adapter(number: int, tenant: str = "acme") -> AdapterRef:
    return AdapterRef(tenant, f"adapter-{number}", 1, f"{number:064x}", 8)


def expected(request: EngineRequest, count: int) -> list[int]:
    digest = None if request.adapter is None else request.adapter.digest
    return reference(digest, request.prompt_ids, count, VOCAB_SIZE, request.adapter_from)
