"""First steps that begin while their adapter is copied: each layer's pages come only after the step has asked for that
layer, into memory full of NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from loraplex.adapters.device.arrival import Arrival, pages_by_layer
from loraplex.adapters.device.device_copies import PacedCopies
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny
from support.simulator.core_integrity import check_core
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PATIENCE_S = 20.0
CHOSEN = {name: ADAPTERS[name] for name in ("all", "some", "many-ranks")} | {
    name: KINDS[name] for name in ("dora", "head", "dora-head")
}
PROMPTS = {name: [3 + (7 * i + len(name)) % (VOCAB - 3) for i in range(30)] for name in CHOSEN}


class Gate:
    """A queue of copies that copies a page once a step waits for it, or nobody will: the first ones at once."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.wanted = 0
        self.done = 0
        self.first = 0
        self.overlapped = 0
        self.fails_at: int | None = None
        self.hangs_at: int | None = None
        self.hung = threading.Event()

    def begin(self, arrival: Arrival) -> None:
        with self.changed:
            self.wanted = self.first = int(arrival.needed[0])
            self.done = 0

    def want(self, pages: int) -> None:
        with self.changed:
            self.wanted = max(self.wanted, pages)
            self.changed.notify_all()

    def enqueue(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            with self.changed:
                came = self.changed.wait_for(lambda: self.wanted >= self.done + len(source), PATIENCE_S)
            assert came, "a page that no step asked for"
            if self.fails_at is not None and self.done >= self.fails_at:
                raise OSError("the link is gone")
            if self.hangs_at is not None and self.done >= self.hangs_at:
                assert self.hung.wait(PATIENCE_S)
            np.copyto(target.numpy(), source.numpy())
            self.done += len(source)
            self.overlapped += self.done > self.first

        return copy


@pytest.fixture(scope="module", params=["llama"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(folder, (FAMILIES | OTHERS)[request.param])


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    return save_adapters(base, tmp_path_factory.mktemp("adapters"), CHOSEN)


@pytest.fixture
def make_engine(base, folders, tmp_path, monkeypatch):
    # So that the layers of a tiny adapter have pages of their own.
    for name in ("MIN_PAGE_BYTES", "MAX_PAGE_BYTES"):
        monkeypatch.setattr(f"loraplex.adapters.device.layout.{name}", 4 << 10)
    monkeypatch.setattr("loraplex.adapters.device.device_copies.PIECE_BYTES", 1)
    made = []

    def make(*, early, lookahead=0, **settings):
        engine = LocalEngine(
            base,
            tmp_path / str(len(made)),
            dtype="float32",
            max_model_len=100,
            max_num_seqs=8,
            kv_cache_memory=1 << 20,
            adapter_memory=4 << 20,
            adapter_cpu_memory=4 << 20,
            num_threads=1,
            lookahead=lookahead,
            **settings,
        )
        made.append(engine)
        engine.refs = {None: None} | {n: engine.publish(folder, name=n) for n, folder in folders.items()}
        arena = engine.built.transport._arena
        arena._pages[1:].view(torch.float32).fill_(torch.nan)
        engine.gate = gate = Gate()
        if early:
            force_early(engine, arena, gate, monkeypatch)
        return engine

    yield make
    for engine in made:
        engine.gate.hung.set()
        engine.gate.want(1 << 30)
        engine.close()


def force_early(engine, arena, gate, monkeypatch):
    """The rule always lets a step begin once the first layer is there."""
    monkeypatch.setattr(engine.core._scheduler.adapters, "_lead_s", lambda seq: 1e9)
    monkeypatch.setattr(arena, "_copies", PacedCopies(gate))
    write, wait_for = arena.write, Arrival.wait_for

    def begin(image, slot, pages, arrival=None, arrived=None):
        gate.begin(arrival)
        write(image, slot, pages, arrival, arrived)

    def asked(self, layer):
        gate.want(int(self.needed[layer]))
        came = wait_for(self, layer)
        if layer == len(self.needed) - 1:
            gate.want(1 << 30)
        return came

    monkeypatch.setattr(arena, "write", begin)
    monkeypatch.setattr(Arrival, "wait_for", asked)


def ask(engine, name, suffix="", **sampling):
    engine.add(
        f"{name}{suffix}", PROMPTS.get(name, PROMPTS["all"]), engine.refs[name], max_tokens=8, **sampling
    )


def is_idle(engine):
    """Nothing is leased, half resident, or lost."""
    engine.step()
    check_core(engine.core)
    stats = engine.core.stats()
    used = sum(entry.pages for entry in engine.core.cache_entries())
    return stats.num_leases == 0 and stats.num_arena_pages_used == used


@pytest.mark.parametrize(
    ("base", "lookahead"), [("llama", 0), ("llama", 1), ("granite", 1)], indirect=["base"]
)
def test_the_bits_are_those_of_a_whole_copy(make_engine, lookahead):
    """One cold adapter after the other, beside a request of the base, on our own layer loop and on one of transformers.
    The products of the latter are torch's, which depend on who else is in a step: there log probabilities are the same
    up to rounding."""
    whole, early = (make_engine(early=early, lookahead=lookahead) for early in (False, True))
    exact = whole.built.info.architecture == "llama"
    for name in CHOSEN:
        for engine in (whole, early):
            engine.add(f"{name}-base", PROMPTS["all"], max_tokens=8)
            ask(engine, name, logprobs=2)
            engine.run()
            ask(engine, name, "-again")
            engine.run()
        for request in (f"{name}-base", name, f"{name}-again"):
            assert early.tokens(request) == whole.tokens(request)
        found, expected = (
            b"".join(event.scores.output.values for event in engine.events[name] if event.scores is not None)
            for engine in (early, whole)
        )
        assert expected
        assert found == expected or (not exact and close(found, expected))
    assert early.gate.overlapped > 10
    eventually(lambda: is_idle(early))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_copy_that_fails_behind_a_step_ends_its_own_requests_alone(make_engine, monkeypatch, lookahead):
    monkeypatch.setattr("loraplex.adapters.cache.failures.FIRST_BACKOFF_S", 0.05)
    whole, early = (make_engine(early=early, lookahead=lookahead) for early in (False, True))
    for engine in (whole, early):
        ask(engine, "some")
        engine.run()
    gate = early.gate
    gate.fails_at = pages_of_first_layer(early, "all") + lookahead
    for name in ("all", "some", None):
        for engine in (whole, early):
            ask(engine, name, "-beside")
    for engine in (whole, early):
        engine.run()
    error = early.events["all-beside"][-1].error
    assert error is not None
    assert error.code == "adapter_unavailable"
    for request in ("some-beside", "None-beside"):
        assert early.tokens(request) == whole.tokens(request)
    eventually(lambda: is_idle(early))
    assert early.core.residency().get(early.refs["all"].digest) is None
    gate.fails_at = None

    def comes_back():
        early.events.pop("all-again", None)
        ask(early, "all", "-again")
        early.run()
        return early.events["all-again"][-1].error is None

    eventually(comes_back)
    assert early.tokens("all-again") == whole.tokens("all-beside")


def close(found, expected):
    return np.allclose(np.frombuffer(found, np.float32), np.frombuffer(expected, np.float32), atol=1e-4)


def pages_of_first_layer(engine, name):
    transport = engine.built.transport
    ticket = transport.load(engine.refs[name])
    eventually(lambda: ticket.done)
    layout = transport._arena.layout
    needed = pages_by_layer(ticket.value, layout.num_layers, layout.granules_per_page)
    ticket.value.release()
    assert needed is not None
    assert needed[0] < needed[1]
    return int(needed[0])


def test_a_step_waits_for_a_layer_for_so_long_and_no_longer(make_engine, monkeypatch):
    monkeypatch.setattr("loraplex.adapters.device.arrival.MOST_WAIT_S", 0.05)
    monkeypatch.setattr("loraplex.adapters.cache.failures.FIRST_BACKOFF_S", 0.05)
    engine = make_engine(early=True)
    first = pages_of_first_layer(engine, "all")
    gate = engine.gate
    gate.hangs_at = first
    ask(engine, "all")
    engine.add("base", PROMPTS["all"], max_tokens=8)
    engine.run()
    error = engine.events["all"][-1].error
    assert error is not None
    assert error.code == "adapter_unavailable"
    assert len(engine.tokens("base")) == 8
    # Its pages are nobody's before the copy has ended.
    engine.step()
    assert engine.core.stats().num_arena_pages_used > 0
    check_core(engine.core)
    gate.hung.set()
    gate.want(1 << 30)
    eventually(lambda: is_idle(engine))
    assert engine.core.stats().num_arena_pages_used == 0


def test_a_request_that_ends_meanwhile_leaves_the_adapter_whole(make_engine):
    whole, engine = make_engine(early=False), make_engine(early=True)
    ask(engine, "all")
    digest = engine.refs["all"].digest
    eventually(lambda: engine.step() or engine.core._cache.is_arriving(digest) or engine.events)
    engine.core.abort("all")
    engine.run()
    engine.gate.want(1 << 30)
    eventually(lambda: is_idle(engine) and not engine.core._cache.is_arriving(digest))
    for each in (whole, engine):
        ask(each, "all", "-again")
        each.run()
    assert engine.tokens("all-again") == whole.tokens("all-again")


def test_a_measurement_waits_for_the_whole_copy(make_engine):
    whole, engine = make_engine(early=False), make_engine(early=True)
    ref = engine.refs["all"]
    ask(engine, "all")
    engine.measure("sites", ref)
    whole.measure("sites", whole.refs["all"])
    whole.run()
    engine.run()
    assert len(engine.tokens("all")) == 8
    found, expected = engine.outputs("sites"), whole.outputs("sites")
    assert found == expected
