"""A real engine in the test's own process, driven step by step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.cache.residency import PinRefused
from loraplex.adapters.invocation import find_invocation
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.split_linears import join_split_linears
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.tied_head import name_tied_head
from loraplex.engine.build import build_engine
from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.device_memory import DeviceMemory
from loraplex.engine.execution.inputs import Recorder
from loraplex.engine.pooling import Pooling
from loraplex.engine.types import EngineRequest, MeasureRequest, SamplingParams, TokenEvent


def _place(prompt: tuple[int, ...], adapter: AdapterRef | None) -> int:
    """Where the adapter begins to act; an activated one must be invoked."""
    if adapter is None or not adapter.invocation:
        return 0
    place = find_invocation(prompt, adapter.invocation)
    assert place is not None
    return place


class LocalEngine:
    """`EngineCore` with the real model and arena, an artifact store of its own, and no process around it."""

    def __init__(
        self,
        model_dir: Path,
        work_dir: Path,
        *,
        wrap_model: Callable[[Any], Any] | None = None,
        recorder: Recorder | None = None,
        memory: DeviceMemory | None = None,
        **settings: Any,
    ) -> None:
        self.store = ArtifactStore(work_dir / "artifacts")
        self.base = load_base_spec(model_dir, cache_dir=work_dir)
        # With drafts the steps depend on what steps cost at this moment.
        settings = {"device": "cpu", "speculation": "off", "max_step_ms": 0, **settings}
        config = EngineConfig(model_path=str(model_dir), artifact_dir=str(work_dir / "artifacts"), **settings)
        self.built = build_engine(
            config, lambda: None, wrap_model=wrap_model, recorder=recorder, memory=memory
        )
        self.core = self.built.core
        self.events: dict[str, list[TokenEvent]] = {}

    def publish(
        self,
        folder: Path,
        *,
        tenant: str = "acme",
        name: str | None = None,
        put: Callable[[Path, Path], Any] = shutil.copy,
    ) -> AdapterRef:
        """Admit a PEFT directory and put it into the store; `put(source, target)` brings its tensors there."""
        with self.store.begin_staging() as staging:
            shutil.copy(folder / "adapter_config.json", staging.config_path)
            put(folder / "adapter_model.safetensors", staging.tensors_path)
            joined = [*join_split_linears(staging, self.base, 64), *name_tied_head(staging, self.base)]
            spec = inspect_adapter(
                staging.config_path, staging.tensors_path, self.base, max_rank=64, earlier=joined
            )
            self.store.commit(staging, spec.digest)
        return AdapterRef(tenant, name or folder.name, 1, spec.digest, spec.rank, spec.invocation)

    def add(
        self, request_id: str, prompt: Iterable[int], adapter: AdapterRef | None = None, **sampling: Any
    ) -> None:
        given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, **sampling}
        tenant = "acme" if adapter is None else adapter.tenant_id
        self.core.add_request(
            EngineRequest(
                request_id,
                tenant,
                ids := tuple(prompt),
                SamplingParams(**given),
                adapter,
                adapter_from=_place(ids, adapter),
            )
        )

    def pin(self, *adapters: AdapterRef, timeout_s: float = 60.0) -> None:
        """Have them on the device. Raises PinRefused where pins may not hold as much, or a load fails."""
        for adapter in adapters:
            self.core.pin(adapter)
        end = time.monotonic() + timeout_s
        while missing := [one for one in adapters if self.core.residency().get(one.digest) != "hot"]:
            if time.monotonic() > end:
                raise TimeoutError("the adapters did not come onto the device")
            if not self.core.stats().num_pins_coming:
                entries = self.core.cache_entries([one.digest for one in missing])
                why = next((entry.error for entry in entries if entry.error), "pins hold as much as they may")
                raise PinRefused(f"{len(missing)} of {len(adapters)} pins hold nothing: {why}")
            self.step()
            time.sleep(0.001)

    def embed(
        self,
        request_id: str,
        prompt: Iterable[int],
        adapter: AdapterRef | None = None,
        pooling: Pooling = "mean",
    ) -> None:
        tenant = "acme" if adapter is None else adapter.tenant_id
        sampling = SamplingParams(max_tokens=0)
        self.core.add_request(
            EngineRequest(
                request_id,
                tenant,
                ids := tuple(prompt),
                sampling,
                adapter,
                pooling=pooling,
                adapter_from=_place(ids, adapter),
            )
        )

    def embedding(self, request_id: str) -> torch.Tensor:
        """[C] float32; raises if the request ended in an error."""
        last = self.events[request_id][-1]
        assert last.finish_reason == "length", last.error
        assert last.pooled is not None
        return torch.frombuffer(bytearray(last.pooled), dtype=torch.float32)

    def measure(self, request_id: str, adapter: AdapterRef) -> None:
        """Ask for the outputs of its sites."""
        self.core.measure(MeasureRequest(request_id, adapter))

    def outputs(self, request_id: str) -> SiteOutputs:
        """Raises if the request ended in an error."""
        last = self.events[request_id][-1]
        assert last.finish_reason == "length", last.error
        assert last.measured is not None
        return last.measured

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
        return events

    def run(self, *, timeout_s: float = 240.0) -> None:
        """Step until nothing is left to do."""
        end = time.monotonic() + timeout_s
        while self.core.has_work:
            if time.monotonic() > end:
                raise TimeoutError("the engine did not come to an end")
            if not self.step() and self.core.idle_s() != 0.0:
                time.sleep(0.001)  # only a loader thread can move things now

    def tokens(self, request_id: str) -> list[int]:
        """All output tokens; raises if the request ended in an error."""
        events = self.events[request_id]
        assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].error is None, events[-1].error
        return [token for event in events for token in event.token_ids]

    def close(self) -> None:
        self.built.close()


def answers_in_one_batch(
    base: Path,
    folder: Path,
    adapters: Mapping[str, Path],
    prompt: Sequence[int],
    max_tokens: int,
    **sizes: Any,
) -> dict[str, list[int]]:
    """Greedy tokens of "base" and of each adapter, asked at once in float32."""
    memory = {"kv_cache_memory": 8 << 20, "adapter_memory": 8 << 20, "max_model_len": 64}
    engine = LocalEngine(base, folder, dtype="float32", **memory | sizes)
    try:
        refs = {name: engine.publish(path) for name, path in adapters.items()}
        for name in ("base", *adapters):
            engine.add(name, prompt, refs.get(name), max_tokens=max_tokens)
        engine.run()
        return {name: engine.tokens(name) for name in ("base", *adapters)}
    finally:
        engine.close()
