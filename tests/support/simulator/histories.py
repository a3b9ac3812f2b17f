"""Random histories of the engine core, each from one seed, with an oracle beside every step.

    play(seed) -> Summary         raises Violation, with the seed and the last things that happened

A history has tenants with weights, grammars whose matchers take time, fail or come too late, adapters (some with the
  same bytes under two tenants), prompts with common starts, bursts of arrivals, aborts (in the middle of a scored
  prompt too), deadlines, requests that wait for a load no longer than they say, lines of batches,
  reservations and caps on memory, loads
  and copies that take time, fail, hang or come too late, a store that fails or hangs for a while, damaged uploads,
  laid-out copies on the disk with flipped bits, cut short or of another adapter, versions that are deleted and
  uploaded again, deaths of the engine, after which answers that were begun go on in another, steps and rows that fail,
  KV that is not finite and is noticed late, a device that has too little memory for a while, pins and drops, and never
  quite enough blocks, pages, slots or host memory.
  The core, the scheduler, the blocks, the adapter cache and the files of laid-out copies are the real ones; the runner,
  the transport, the store and the clock are fakes.

What is checked, after every step or at the end:
  every manager's own lists (`check_core`); a request ends exactly once, and when it was told to; its tokens are the
  fake model's for its own digest and prompt, cut at the right place; its usage, times and first event are right; an
  error has its cause; nobody reads another tenant's KV; no reservation, cap or pin is broken; host memory is given
  back once; damage is told; nothing of a deleted version stays in memory; an engine that says it is idle has nothing
  to do, and one that waits for something waits for something that will come; at the end nothing is held. Every eighth
  history is about fairness alone: the served amounts of backlogged tenants stay within the bound.

The world of a history is in `world`, what lies below its host memory in `tiers`, what is checked in `oracle` and
`fairness`; here it is played.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import replace
from math import inf
from typing import Any

from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.step_bound import LEAD
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, MeasureRequest, SamplingParams, StepPlan
from support.engine.fake_runner import FakeRunner, Fault
from support.engine.fake_transport import Fate
from support.fake_block_disk import BlockDisk
from support.simulator.core_integrity import check_core, is_named
from support.simulator.drafters import FREE, DrafterKind, PlantedDrafter
from support.simulator.fairness import Shares
from support.simulator.grammars import FakeGrammars
from support.simulator.oracle import Oracle, Violation
from support.simulator.summary import Summary
from support.simulator.tiers import Disk, TieredTransport, WatchedCache
from support.simulator.world import EOS_IDS, LOAD_TIMEOUT_S, VOCAB_SIZE, World, memory_needed

__all__ = ["MIN_EVENTS", "Summary", "Violation", "play", "play_many"]

MIN_EVENTS = 160
MAX_DRAIN_STEPS = 4_000
FAIR_EVERY = 8


class History:
    """One history: `now` is its clock, `room` what the device has of memory for a step (see `memory_needed`). With
    `drafts` it has no lookahead, and this drafter; with `states` a layer keeps a state; `windows` as of `World`; with
    `host` there are blocks in host memory, with `disk` behind that too."""

    def __init__(
        self,
        seed: int,
        *,
        fair: bool | None = None,
        drafts: DrafterKind | None = None,
        states: bool = False,
        host: bool = False,
        disk: bool = False,
        windows: bool = False,
    ) -> None:
        self.seed = seed
        self.now = 100.0
        self.num_events = self.num_steps = 0
        self.trail: deque[str] = deque(maxlen=40)
        self.room = inf
        self.total = Summary(histories=1)
        is_fair = seed % FAIR_EVERY == 0 if fair is None else fair
        self.world = world = World(seed, fair=is_fair, windows=windows)
        self._drafts, self._guessing = drafts, random.Random(seed)
        if drafts is not None:
            world.lookahead, world.config = 0, replace(world.config, lookahead=0)
        if states:
            places = self._guessing.randint(1, world.config.max_num_seqs + 1)
            num_states = places + self._guessing.randint(1, 3 * places)
            world.config = replace(world.config, num_states=num_states, num_windows=places)
        if host or disk:
            world.put_blocks_on_host(disk=disk)
        self.block_disk = BlockDisk(random.Random(f"{seed}/disk")) if disk else None
        self.disk = Disk([*world.sizes], world.storing)
        self._num_slots, self._host_pages = world.rng.randint(2, 4), world.rng.randint(2, 10)
        if world.p_tier and world.storing.random() < 0.5:
            self._host_pages = 0  # each adapter comes from the disk every time
        self._start_engine()
        self.oracle = Oracle(world, self.runner, self.grammars)
        self.shares: Shares | None = None  # of a history about fairness

    def _start_engine(self) -> None:
        world = self.world
        self.transport = TieredTransport(
            lambda: self.now, world.num_pages, world.pages_of, world.load_fate, world.copy_fate, self.disk,
            world.overlapping.random,
        )  # fmt: skip
        self.cache = WatchedCache(
            self.transport,
            num_slots=self._num_slots,
            host_pages=self._host_pages,
            load_timeout_s=LOAD_TIMEOUT_S,
            world=world,
        )
        self.runner = FakeRunner(
            world.config.num_blocks,
            self.transport.mark_in_slot,
            vocab_size=VOCAB_SIZE,
            fault=self._fault,
            tokens_per_row=world.tokens_of,
            max_in_flight=1 + world.lookahead,
            has_matcher=lambda request_id: request_id in self.grammars.ready,
            is_live=lambda row: self.core._tracker.sequence(row) is not None,
            windows=world.config.windows,
            num_states=world.config.num_states,
            num_windows=world.config.num_windows,
            is_named=lambda state: is_named(self.core, state),
            num_host_blocks=world.config.num_host_blocks,
            most_restored=world.config.most_restored_blocks,
            state_slots=world.config.state_slots,
        )
        self.grammars = FakeGrammars(lambda: self.now, world.constraining)
        self.drafter: PlantedDrafter | None = None
        if self._drafts is not None:
            self.drafter = PlantedDrafter(self._drafts, self._guessing, VOCAB_SIZE)
        self.core = EngineCore(
            world.config,
            self.runner,
            self.cache,
            eos_ids=EOS_IDS,
            clock=lambda: self.now,
            grammars=self.grammars,
            speculation=None if self.drafter is None else Speculation(self.drafter, FREE),
            bound=world.bound(),
            lead=world.lead(),
            disk=self.block_disk and self.block_disk.open(self.runner.host, lambda: self.now),
        )

    def _fault(self, plan: StepPlan) -> Fault:
        rng = self.world.rng
        if self.world.p_fault and not self.world.fair and rng.random() < self.world.p_fault:
            self._happened("a step fails")
            kind = rng.randrange(3)
            count = len(plan.parts)
            if kind < 2 or not count:
                return Fault(("submit", "collect")[kind % 2])
            return Fault(rows=frozenset(rng.sample(range(count), rng.randint(1, count))))
        mishaps = self.world.mishaps
        needed = sum(memory_needed(part.num_tokens, part.start + part.num_tokens) for part in plan.parts)
        if needed > self.room:
            self._happened("a step does not fit")
            return Fault(mishaps.choice(("submit", "collect")), memory=True)
        if (
            plan.scheduled
            and self.world.p_poison
            and not self.world.fair
            and mishaps.random() < self.world.p_poison
        ):
            self._happened("what a row leaves is not finite")
            self.total.poisoned += 1
            return Fault(poisoned=frozenset({mishaps.randrange(len(plan.scheduled))}))
        return Fault()

    def _happened(self, what: str) -> None:
        self.num_events += 1
        self.trail.append(f"{self.num_steps}: {what}")

    # The play.

    def play(self) -> Summary:
        try:
            self._play()
        except Violation as error:
            raise Violation(f"seed {self.seed}: {error}\n" + "\n".join(self.trail)) from error
        except Exception as error:
            if isinstance(error, TypeError) and "argument" in str(error):
                raise  # a planted bug that does not fit what it replaces is not caught by that
            raise Violation("\n".join((f"seed {self.seed}: {error!r}", *self.trail))) from error
        finally:
            self.disk.close()
        self._add_engine()
        total = self.total
        total.events, total.steps, total.requests = self.num_events, self.num_steps, len(self.oracle.records)
        total.grammar_ends, total.measured = self.oracle.num_grammar_ends, self.oracle.num_measured
        for record in self.oracle.records.values():
            total.endings[record.ending] = total.endings.get(record.ending, 0) + 1
        return total

    def _add_engine(self) -> None:
        """Count what the present engine did."""
        stats, total = self.core.stats(), self.total
        total.tokens += stats.generation_tokens
        total.preemptions += stats.num_preemptions
        total.prefix_hits += stats.prefix_cache_hits
        total.out_of_memory += stats.num_out_of_memory
        total.restored += self.runner.host.num_restored
        total.states_restored += self.runner.host.num_states_restored
        total.from_disk += stats.kv_disk.restored
        total.late_reads += stats.kv_disk.late
        total.loads += self.transport.num_loads
        total.overlapped += self.transport.num_usable
        total.from_copies += self.transport.num_from_copies
        total.held_for_grammar += self.grammars.num_held
        if self.drafter is not None:
            total.drafted += sum(drafted for drafted, _ in self.drafter.log)
            total.accepted += sum(accepted for _, accepted in self.drafter.log)

    def _play(self) -> None:
        if self.world.fair:
            self._flood()
        else:
            while self.num_events < MIN_EVENTS:
                self._act()
                self._step()
        first = self.num_steps
        while self.core.has_work:
            if self.num_steps - first > MAX_DRAIN_STEPS:
                raise Violation(f"after {MAX_DRAIN_STEPS} steps, {sorted(self.oracle.live)} have not ended")
            self._step()
        self.oracle.check_end(self.core)

    def _act(self) -> None:
        rng = self.world.rng
        if self.oracle.live and rng.random() < 0.01:
            self._duplicate(rng.choice(list(self.oracle.live)))
        # Steps of an idle core show nothing.
        if rng.random() < self.world.p_arrive or not (self.oracle.live or self.transport.next_due):
            for _ in range(rng.choice((1, 1, 2, 3, 8))):
                self._arrive()
        if self.oracle.live and rng.random() < self.world.p_abort:
            self._abort(rng.choice(list(self.oracle.live)))
        self._mishap()
        if rng.random() < 0.02:
            self._jump(10 ** rng.uniform(-1, 1))
        if self.world.p_operator and rng.random() < self.world.p_operator:
            self._operate()
        if self.world.p_tier and self.world.storing.random() < self.world.p_tier:
            self._disturb_tiers()

    def _disturb_tiers(self) -> None:
        world, draw, disk = self.world, self.world.storing, self.disk
        match draw.randrange(0 if self.block_disk is None else 6, 12):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                what = disk.damage_copy()
                self.total.damaged_copies += bool(what)
            case 7:
                fates = (Fate(0.1, "the storage is not reachable"), Fate(None))
                world.outage = draw.choice(fates) if world.outage is None else None
                what = f"loads meet {world.outage}"
            case 8:
                damaged = [digest for digest, is_whole in disk.whole.items() if not is_whole]
                for digest in damaged or draw.sample([*disk.whole], min(1, len(disk.whole))):
                    world.suspects.add(digest)
                    disk.whole[digest] = not disk.whole[digest]
                what = f"uploads are whole: {[*disk.whole.values()]}"
            case 9 | 10:
                what = self._delete_or_upload()
            case _:
                what = "the engine dies"
                self._restart()
        if what:
            self._happened(what)

    def _delete_or_upload(self) -> str:
        again = self.world.upload_again()
        for digest in again:
            self.disk.whole[digest] = True
            self.oracle.deleted.pop(digest, None)
        if again or not self.disk.whole:
            return f"{len(again)} versions are uploaded again"
        digest = self.world.storing.choice([*self.disk.whole])
        self.total.deletions += 1
        self.world.delete(digest)
        self.disk.delete(digest)
        self.core.drop(digest)
        self.runner.host.erased(digest)
        named = {
            record.request.adapter.digest for record in self.oracle.live.values() if record.request.adapter
        }
        if digest not in named:
            self.oracle.deleted[digest] = self.now
        return f"{digest[:6]} is deleted"

    def _restart(self) -> None:
        """The engine's process dies; the store and the disk stay. Most answers that were begun go on in another."""
        draw = self.world.continuing
        begun = [
            record
            for record in self.oracle.live.values()
            if record.tokens and not record.aborted and draw.random() < 0.8
        ]
        self._add_engine()
        self.total.restarts += 1
        self._start_engine()
        self.oracle.restarted(self.runner, self.grammars)
        for record in begun:
            request = self.oracle.resumed(record, self.now, self.room)
            self._happened(f"{request.request_id} goes on behind {len(request.generated)} tokens")
            self.total.resumed += 1
            self.core.set_terms(request.tenant_id, self.world.terms(request.tenant_id))
            self._send(request)

    def _mishap(self) -> None:
        mishaps = self.world.mishaps
        scored = [name for name, record in self.oracle.live.items() if record.scores and not record.tokens]
        if scored and mishaps.random() < 0.1:
            self.total.cut_prompts += 1
            self._abort(mishaps.choice(scored))
        if mishaps.random() < (self.world.p_shortage if self.room == inf else 0.05):
            self.room = mishaps.choice((1, 2, 3, 4, 8, 16)) if self.room == inf else inf
            self._happened(f"a step may need {self.room} of the device's memory")
            self.oracle.room_is(self.room)

    def _flood(self) -> None:
        """Every tenant has more waiting than can be served for a long time; new tenants come in between."""
        world, rng = self.world, self.world.rng
        max_prompt, max_new = rng.choice((20, 50)), rng.choice((3, 10))
        tenants = [f"t{index}" for index in range(rng.randint(2, 4))]
        weights = {tenant: float(rng.choice((1, 1, 2, 4))) for tenant in tenants}
        lead = LEAD if world.is_bounded else 0.0  # of tenants that have a share of a step
        self.shares = Shares(weights, max_prompt + 2 * world.config.max_num_seqs * max_new, lead)
        self.runner.keep_plans = True
        for tenant in rng.sample(tenants, len(tenants)):
            longest = rng.randint(1, max_prompt)
            for _ in range(MIN_EVENTS // len(tenants) + 1):
                prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest)))
                sampling = SamplingParams(max_tokens=rng.randint(1, max_new), ignore_eos=True)
                request_id = f"{tenant}-{len(self.oracle.records)}"
                request = EngineRequest(request_id, tenant, prompt, sampling)
                self.shares.sent(request)
                self._add(request, TenantTerms(weights[tenant]))
            for _ in range(rng.randint(0, 20)):
                self._step()

    def _arrive(self) -> None:
        request = self.world.request(f"r{len(self.oracle.records)}")
        self._add(request, self.world.terms(request.tenant_id))

    def _add(self, request: EngineRequest, terms: TenantTerms) -> None:
        digest = "" if request.adapter is None else request.adapter.digest
        is_hot = self.core.residency().get(digest) == "hot"
        self.oracle.sent(request, self.now, self.room, is_hot=is_hot)
        self._happened(f"{request.request_id} arrives")
        self.core.set_terms(request.tenant_id, terms)
        self._send(request)

    def _send(self, request: EngineRequest) -> None:
        if request.request_id in self.world.measured:
            assert request.adapter is not None
            self.core.measure(MeasureRequest(request.request_id, request.adapter, request.deadline))
        else:
            self.core.add_request(request)

    def _abort(self, request_id: str) -> None:
        self._happened(f"{request_id} is aborted")
        self.oracle.live[request_id].aborted = True
        self.core.abort(request_id)
        self.core.abort("nobody")

    def _duplicate(self, request_id: str) -> None:
        self._happened(f"{request_id} is sent twice")
        self._send(self.oracle.live[request_id].request)
        check_core(self.core)

    def _operate(self) -> None:
        refs = [ref for refs in self.world.adapters.values() for ref in refs if ref is not None]
        if not refs:
            return
        ref = self.world.rng.choice(refs)
        self._happened(f"the operator touches {ref.digest[:6]}")
        if ref.tenant_id not in self.oracle.known:
            self.oracle.brought_before.add(ref.tenant_id)
        match self.world.rng.randrange(3):
            case 0:
                self.core.drop(ref.digest)
            case 1:
                self.core.prefetch(ref)
            case 2:
                self.oracle.operated = True  # a pin may leave no room for others
                try:
                    self.core.pin(ref)
                except Exception:
                    for other in refs:
                        self.core.unpin(other.digest)

    def _jump(self, seconds: float) -> None:
        self._happened(f"{seconds:.2f} s pass")
        self.now += seconds

    def _step(self) -> None:
        self.now += 0.005 + 0.05 * self.world.rng.random()
        for _ in range(self.transport.settle() + (0 if self.block_disk is None else self.block_disk.turn())):
            self._happened("a load, a copy or a read ends")
        started = self.now
        self.num_steps += 1
        shares = self.shares
        before = set() if shares is None else shares.backlog()
        for event in self.core.step():
            self.oracle.take(event, self.now)
            if shares is not None:
                shares.told(self.oracle.records[event.request_id], event)
        self.oracle.check_step(self.core, self.cache, self.transport, started)
        if self.drafter is not None and self.drafter.complaints:
            raise Violation("; ".join(self.drafter.complaints))
        if shares is not None:
            shares.planned(self.runner.plans)
            self.runner.plans.clear()
            shares.check(before & shares.backlog())
        self._wait_if_idle()

    def _wait_if_idle(self) -> None:
        """If the core says that only time or a load can help, let time pass until then."""
        idle_s = self.core.idle_s()
        if idle_s == 0.0 or not self.core.has_work:
            return
        times = [] if idle_s is None else [self.now + idle_s]
        times += [due for due in (self.transport.next_due, self.grammars.next_due) if due is not None]
        if not times:
            raise Violation(f"{sorted(self.oracle.live)} wait for something that will never come")
        self.now = max(self.now, min(times))


def play(seed: int, **kind: Any) -> Summary:
    """One history; `kind` as of `History`. Raises Violation."""
    log = logging.getLogger("loraplex")
    level = log.level
    log.setLevel(logging.CRITICAL)  # steps fail by the thousand here, each with a traceback
    try:
        return History(seed, **kind).play()
    finally:
        log.setLevel(level)


def play_many(seeds: range) -> Summary:
    total = Summary()
    for seed in seeds:
        total.add(play(seed))
    return total
