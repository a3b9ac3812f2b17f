"""The world of a random history of the engine core: how large everything is, who sends requests, and what goes wrong.

Drawn from one seed. Thirteen streams of chance, so that a new kind of mishap changes no history but by that mishap.
"""

from __future__ import annotations

import random
from dataclasses import replace

from loraplex.adapters.cache.tenant_memory import NO_MEMORY_LIMITS, MemoryLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.pooling import POOLINGS
from loraplex.engine.scheduling.timing.copy_lead import CopyLead
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, MeasureRequest, SamplingParams, ScheduledSequence
from loraplex.kernels.attention import BLOCK_SIZE
from support.adapters.cache_fakes import PAGE_BYTES
from support.engine.fake_transport import Fate
from support.simulator.bounds import drawn_bound

VOCAB_SIZE = 61
EOS_IDS = frozenset({0, 1})
LOAD_TIMEOUT_S = 4.0


class World:
    """`fair`: a history about fairness alone, in which nothing fails. `windows`: layers see windows, whatever the seed,
    except in a fair one. `suspects` are the digests whose way to the device went wrong, or might; `measured` the ids of
    requests that are sent as MeasureRequests."""

    def __init__(self, seed: int, *, fair: bool, windows: bool = False) -> None:
        self.rng = random.Random(seed)
        self.asking = random.Random(seed)  # for log probabilities
        self.mishaps = random.Random(seed)  # of memory and numbers
        self.constraining = random.Random(seed)  # grammars
        self.embedding = random.Random(seed)
        self.measuring = random.Random(seed)
        self.hurrying = random.Random(seed)  # requests that do not wait long for their adapters
        self.activating = random.Random(seed)  # places from which adapters act
        self.continuing = random.Random(seed)  # answers that go on in another engine
        self.batching = random.Random(seed)  # lines of batches
        self.seed = seed
        self.fair = fair
        self.lookahead = self.rng.randint(0, 1)
        self.sharing = random.Random(seed)  # tenants' limits on memory for adapters
        self.storing = random.Random(seed)  # mishaps of the store, the disk and the engine's process
        self.timing = random.Random(seed)  # bounds of steps' times
        self.is_bounded = seed % 3 == 1
        self.windowing = random.Random(seed)  # layers that see a window
        self.has_windows = (windows or seed % 7 == 5) and not fair
        self._draw_sizes()
        self._draw_tenants()
        self.p_tier = 0.0 if fair else self.storing.choice((0.0, 0.02, 0.1))
        self.outage: Fate | None = None  # what a load meets that begins now

    def lead(self) -> CopyLead | None:
        """Draw how much of copies first steps of the engine may cover; in half of the histories nothing."""
        if self.overlapping.random() < 0.5:
            return None
        return CopyLead(drawn_bound(self.overlapping), self.config.max_num_batched_tokens)

    def put_blocks_on_host(self, *, disk: bool) -> None:
        """Give it blocks in host memory, and prompts with longer beginnings in common. With a `disk` behind that tiers
        are disturbed often."""
        if disk and not self.fair:
            self.p_tier = 0.1
        rng = random.Random(f"{self.seed}/host")
        self.config = replace(
            self.config,
            num_host_blocks=rng.choice((1, 2, 4, 10, 60)) * len(self.config.windows),
            most_restored_blocks=rng.choice((1, 1, 2, 5)),
            state_slots=rng.choice((1, 1, 2, 3)),
        )
        *_, one, two = self.starts
        self.starts += [(*one, *two), (*one, *one), (*two, *one)]

    def bound(self) -> StepBound | None:
        """Of a third of the histories, for each engine another."""
        return drawn_bound(self.timing) if self.is_bounded else None

    def _draw_sizes(self) -> None:
        rng = self.rng
        self.p_abort = rng.choice((0.0, 0.03, 0.15))
        self.max_new = rng.choice((3, 8, 20, 40))
        num_blocks = rng.choice((3, 4, 5, 5, 6, 6, 8, 14))
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=rng.choice((40, 16 * num_blocks, 16 * num_blocks + 1, 400)),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice((2, 5, 16, 24, 40, 64)),
            max_waiting=rng.choice((3, 10, 20, 60)),
            lookahead=1 if self.lookahead else 0,
            adapter_wait_aging_s=rng.choice((0.0, 0.3, 1.0, 3.0)),
        )
        if rng.random() < 0.25:
            # Long answers on few blocks: preemption after preemption.
            self.max_new, self.p_abort, num_blocks = 40, 0.0, rng.randint(4, 6)
            self.config = SchedulerConfig(
                num_blocks,
                16 * num_blocks,
                rng.randint(3, 6),
                rng.choice((16, 40)),
                20,
                self.config.lookahead,
                self.config.adapter_wait_aging_s,
            )
        if self.fair:
            self.config = SchedulerConfig(
                24, 64, rng.randint(1, 4), rng.choice((24, 48)), 1000, self.config.lookahead
            )
        self.config = replace(
            self.config,
            max_scored_tokens=self.asking.choice((1, 5, 16, 128)),
        )
        if self.has_windows:
            windows = self.windowing.choice(((None,), (1,), (7,), (17,), (33,), (24, 24)))
            windows = self.windowing.choice(((None, *windows), (*windows, None)))
            self.config = replace(
                self.config, num_blocks=len(windows) * self.config.num_blocks, windows=windows
            )
        self.num_pages = rng.randint(2, 5)
        self.p_arrive = rng.choice((0.05, 0.1, 0.2, 0.5))
        self.p_deadline = rng.choice((0.0, 0.1, 0.4))
        self.p_fault = rng.choice((0.0, 0.01, 0.05))
        self.p_bad_load = rng.choice((0.0, 0.05, 0.3))
        self.p_operator = rng.choice((0.0, 0.0, 0.05))
        self.speculates = rng.random() < 0.25
        self.p_shortage = self.mishaps.choice((0.0, 0.005, 0.02))
        self.p_poison = self.mishaps.choice((0.0, 0.0, 0.02, 0.1))
        self.slow = rng.choice((0.05, 0.5, 2.0))

    def _draw_tenants(self) -> None:
        rng = self.rng
        self.tenants = [f"t{index}" for index in range(rng.randint(1, 4))]
        self.weights = {tenant: float(rng.choice((1, 1, 2, 4))) for tenant in self.tenants}
        self.memory = {tenant: self._memory_limits() for tenant in self.tenants}
        self.caps = {
            tenant: limits.device_bytes_max
            for tenant, limits in self.memory.items()
            if limits.device_bytes_max is not None
        }
        # A digest may belong to several tenants: they uploaded the same bytes.
        digests = [rng.randbytes(32).hex() for _ in range(rng.randint(1, 6))]
        self.sizes = {digest: rng.randint(1, min(3, self.num_pages)) for digest in digests}
        self.adapters: dict[str, list[AdapterRef | None]] = {}
        apart, taken = self.seed % 2 == 1 and self.sharing.random() < 0.6, set[str]()
        for tenant in self.tenants:
            mine = rng.sample(digests, rng.randint(0, len(digests)))
            mine = [digest for digest in mine if digest not in taken]
            taken |= {*mine} if apart else set()
            refs = [AdapterRef(tenant, f"a{number}", number, digest, 8) for number, digest in enumerate(mine)]
            self.adapters[tenant] = [None, *refs]
        one, two, three = (tuple(rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)) for _ in range(3))
        named = [ref.digest for refs in self.adapters.values() for ref in refs if ref is not None]
        self.shared = {digest for digest in named if named.count(digest) > 1}
        self._deleted: dict[str, list[AdapterRef]] = {}
        # The last two differ in their first block alone.
        self.starts = [(), (), one, (*one, *three), (*two, *three)]
        self.suspects: set[str] = set()
        self.overlapping = random.Random(f"{self.seed}/overlapping")
        self.measured: set[str] = set()

    def _memory_limits(self) -> MemoryLimits:
        if self.sharing.random() < 0.5:
            return NO_MEMORY_LIMITS
        draw = [self.sharing.randint(1, self.num_pages) * PAGE_BYTES for _ in range(3)]
        return MemoryLimits(*(size if self.sharing.random() < 0.5 else None for size in draw))

    def terms(self, tenant: str) -> TenantTerms:
        """The terms that it is served by when its next request comes."""
        return TenantTerms(self.weights.get(tenant, 1.0), self.memory.get(tenant, NO_MEMORY_LIMITS))

    def request(self, request_id: str) -> EngineRequest:
        """The next request."""
        rng, asking = self.rng, self.asking
        tenant = rng.choice(self.tenants)
        prompt = rng.choice(self.starts) + tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))
        request = EngineRequest(
            request_id,
            tenant,
            prompt,
            SamplingParams(
                max_tokens=rng.randint(1, self.max_new) if asking.random() < 0.95 else 0,
                logprobs=asking.choice((0, 3)) if asking.random() < 0.2 else None,
                prompt_logprobs=asking.choice((0, 2)) if asking.random() < 0.2 else None,
                stop_token_ids=(5,) if rng.random() < 0.2 else (),
                min_tokens=rng.choice((0, 0, 3)),
                ignore_eos=rng.random() < 0.3,
            ),
            rng.choice(self.adapters[tenant]),
            priority=rng.choice((0, 0, 0, 1)),
            deadline=10 ** rng.uniform(-1, 1) if rng.random() < self.p_deadline else None,
            grammar=self._grammar() if self.constraining.random() < 0.25 else None,
            max_load=self._max_load(),
        )
        if self.seed % 4 == 2 and self.batching.random() < 0.4:
            request = replace(request, background=True, batch=True)
        if request.adapter is not None and len(prompt) > 1 and self.activating.random() < 0.3:
            request = replace(request, adapter_from=self.activating.randrange(1, len(prompt)))
        if self.embedding.random() < 0.15:
            pooling = self.embedding.choice(POOLINGS)
            return replace(request, sampling=SamplingParams(max_tokens=0), grammar=None, pooling=pooling)
        if self.measuring.random() < 0.05 and request.adapter is not None:
            self.measured.add(request_id)
            return MeasureRequest(request_id, request.adapter, request.deadline).queued()
        return request

    def _max_load(self) -> float | None:
        if self.hurrying.random() >= 0.2:
            return None
        return self.hurrying.choice((0.0, 10 ** self.hurrying.uniform(-2, 1)))

    def _grammar(self) -> str:
        kind = self.constraining.choice(("ends", "ends", "ends", "breaks", "refused"))
        return f"{kind} {self.constraining.randint(1, 12)}"

    def pages_of(self, digest: str) -> int:
        return self.sizes[digest]

    def tokens_of(self, row: ScheduledSequence) -> int:
        """How many tokens a step brings for a row that draws."""
        return self.rng.randint(1, 3) if self.speculates else 1

    def delete(self, digest: str) -> None:
        """No request names it from now on."""
        self.suspects.add(digest)
        self._deleted[digest] = []
        for refs in self.adapters.values():
            for ref in refs:
                if ref is not None and ref.digest == digest:
                    self._deleted[digest].append(ref)
                    refs.remove(ref)

    def upload_again(self) -> list[str]:
        """Undoes all deletions. Returns the digests."""
        again, self._deleted = self._deleted, {}
        for refs in again.values():
            for ref in refs:
                self.adapters[ref.tenant_id].append(ref)
        return list(again)

    def load_fate(self, digest: str) -> Fate:
        drawn = self._fate(digest, self.slow, hang=True)
        if self.outage is None:
            return drawn
        self.suspects.add(digest)
        return self.outage

    def copy_fate(self, digest: str) -> Fate:
        # A copy that never ends takes its pages with it for good, and with them the history: it ends late instead.
        return self._fate(digest, self.slow / 10, hang=False)

    def _fate(self, digest: str, seconds: float, *, hang: bool) -> Fate:
        rng = self.rng
        seconds *= rng.random()
        if rng.random() >= self.p_bad_load:
            return Fate(seconds)
        self.suspects.add(digest)
        match rng.randrange(3):
            case 0:
                return Fate(seconds, "the disk said no")
            case 1 if hang:
                return Fate(None)
            case _:
                return Fate(LOAD_TIMEOUT_S + 3 * rng.random())


def memory_needed(num_tokens: int, position: int) -> int:
    """Device memory that a slice up to this position needs, beside the KV."""
    return num_tokens + position // BLOCK_SIZE
