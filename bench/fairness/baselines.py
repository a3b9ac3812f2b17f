"""Other policies in the batch that they were made for, on the same device and the same arrivals.

Two rules of what a batch is:

- `Reserved`, as the artifact of VTC (on S-LoRA, LightLLM) runs it: a request is admitted when the memory holds all
  that run even if every one of them draws its `max_tokens`; nobody is preempted. Whole prompts are computed when they
  are admitted, in a step of their own, which is made every ten steps (or, as the stronger setting, whenever a request
  can be admitted).
- `AsNeeded`, as vLLM runs it: blocks of 16 are given as they are needed, prompts are computed beside the others' rows,
  512 tokens a step in all; where blocks run short, who was admitted last goes back to the queue, and on its way
  back finds what has not been overwritten. As another setting, a block is kept free for each running request when
  another one is admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from bench.fairness.account import COPY_S, LOAD_S, Account, Run, on
from bench.fairness.device import Device
from bench.fairness.orders import (
    FirstCome,
    LeastCounter,
    OracleVtc,
    PlainVtc,
    PredictingVtc,
    Request,
    RoundRobin,
)
from bench.fairness.workloads import Workload
from loraplex.kernels.attention import BLOCK_SIZE

STEP_TOKENS = 512
PREFILL_TOKENS = 3072
"""Of prompts that the artifact admits at once."""
FIRST_COME = "first-come"
ORDERS: dict[str, Callable[[Mapping[str, float]], FirstCome]] = {
    FIRST_COME: FirstCome,
    "round robin": RoundRobin,
    "least counter": LeastCounter,
    "plain VTC": PlainVtc,
    "VTC predicting": PredictingVtc,
    "VTC oracle": OracleVtc,
}


class Adapters:
    """Which are on the device. A load holds the step up, as in vLLM and S-LoRA without prefetching."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._users: OrderedDict[tuple[str, int], int] = OrderedDict()  # the least lately used first
        self._known: set[tuple[str, int]] = set()
        self.copies = 0

    def fits(self, adapter: tuple[str, int]) -> bool:
        users = self._users
        return adapter[1] < 0 or adapter in users or len(users) < self._room or not all(users.values())

    def take(self, adapter: tuple[str, int]) -> float:
        """Seconds until it is there."""
        if adapter[1] < 0:
            return 0.0
        seconds = 0.0
        if adapter not in self._users:
            if len(self._users) == self._room:
                del self._users[next(key for key, users in self._users.items() if not users)]
            self._users[adapter] = 0
            self.copies += 1
            seconds = COPY_S if adapter in self._known else LOAD_S + COPY_S
            self._known.add(adapter)
        self._users[adapter] += 1
        self._users.move_to_end(adapter)
        return seconds

    def leave(self, adapter: tuple[str, int]) -> None:
        if adapter[1] >= 0:
            self._users[adapter] -= 1

    @property
    def loads(self) -> int:
        return len(self._known)


class Batch:
    """A rule says in `step` what is computed next and returns when that is done, or None if there is nothing."""

    def __init__(self, workload: Workload, order: FirstCome, device: Device, seed: int) -> None:
        self._device = on(device, workload)
        self.account = Account(workload, seed)
        self.order = order
        self.running: list[Request] = []  # in the order of admission
        self.adapters = Adapters(workload.adapter_room)
        self.seats = workload.max_running
        self.now = 0.0
        self.preemptions = 0
        self._tells = not workload.swaps  # who of them could run can't be told where adapters take turns

    def play(self) -> Run:
        account, run = self.account, self.account.run
        while self.now < run.seconds:
            for number, arrival in account.arrivals.take(self.now):
                self.order.push(Request(account.came(number, arrival)))
            before = account.backlogged()
            if self.step():
                account.step_ended(before & account.backlogged() if self._tells else set(), self.now)
            else:
                times = (run.seconds, account.arrivals.next_at)
                self.now = max(self.now, min(time for time in times if time is not None))
        account.close(self.now)
        run.preemptions = self.preemptions
        run.loads, run.copies = self.adapters.loads, self.adapters.copies
        return run

    def step(self) -> bool:
        """False if there is nothing to compute."""
        raise NotImplementedError

    def draw(self, requests: list[Request]) -> None:
        """Each samples a token; a request with its last token leaves."""
        account, order, now = self.account, self.order, self.now
        ended = []
        for request in requests:
            last = account.drew(request.served, now)
            order.drew(request)
            if last:
                ended.append(request)
        for request in ended:
            order.ended(request)
            self.leave(request)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.adapters.leave(request.adapter)

    def seconds(self, prompt: int, rows: list[Request]) -> float:
        return self._device.seconds(prompt, len(rows), sum(request.computed for request in rows))


class Reserved(Batch):
    def __init__(
        self, workload: Workload, order: FirstCome, device: Device, seed: int, *, admits_every: int
    ) -> None:
        super().__init__(workload, order, device, seed)
        self._memory = self._device.num_blocks * BLOCK_SIZE
        self._admits_every = admits_every
        self._since = 0

    def step(self) -> bool:
        if not self.running or self._since >= self._admits_every - 1:
            admitted, loading = self._admit()
            if admitted:
                self._since = 0
                self.now += loading + self.seconds(sum(request.prompt for request in admitted), [])
                for request in admitted:
                    request.computed = request.prompt
                    self.account.computed(request.served, request.prompt)
                self.draw(admitted)
                return True
        if not self.running:
            return False
        self._since += 1
        rows = list(self.running)
        self.now += self.seconds(0, rows)
        for request in rows:
            request.computed += 1
        self.draw(rows)
        return True

    def _admit(self) -> tuple[list[Request], float]:
        admitted: list[Request] = []
        prompts, loading = 0, 0.0
        while len(self.running) < self.seats:
            request = self.order.next(self.adapters.fits)
            if request is None or prompts + request.prompt > max(PREFILL_TOKENS, request.prompt):
                break
            if self._most([*self.running, request]) > self._memory:
                break
            self.order.take(request)
            prompts += request.prompt
            loading += self.adapters.take(request.adapter)
            self.running.append(request)
            admitted.append(request)
        return admitted, loading

    @staticmethod
    def _most(requests: list[Request]) -> int:
        """The most memory that these will ever take together: they grow in step, and who may draw least ends first."""
        most = held = 0
        by_end = sorted(((request.to_draw, request.tokens) for request in requests), reverse=True)
        for number, (to_draw, tokens) in enumerate(by_end, 1):
            held += tokens
            most = max(most, held + to_draw * number)
        return most


class AsNeeded(Batch):
    def __init__(self, workload: Workload, order: FirstCome, device: Device, seed: int, *, kept: int) -> None:
        super().__init__(workload, order, device, seed)
        self._kept = kept  # blocks for each running request
        # What a block holds: (request, its number in it). Free ones, those to be overwritten first in front.
        self._content: list[tuple[Request, int] | None] = [None] * self._device.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self._device.num_blocks))

    def step(self) -> bool:
        budget, preempted = STEP_TOKENS, False
        loading = 0.0
        counts: dict[Request, int] = {}
        place = 0
        while place < len(self.running) and budget:
            request = self.running[place]
            count = min(request.tokens - request.computed, budget)
            while not self._grow(request, request.computed + count):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                counts[request] = count
                budget -= count
                place += 1
        while budget and not preempted and len(self.running) < self.seats:
            waiting = self.order.next(self.adapters.fits)
            if waiting is None:
                break
            self._resume(waiting)
            count = min(waiting.tokens - waiting.computed, budget)
            spare = self._kept * len(self.running)
            if not self._grow(waiting, waiting.computed + count, spare):
                self._release(waiting)
                break
            self.order.take(waiting)
            loading += self.adapters.take(waiting.adapter)
            self.running.append(waiting)
            counts[waiting] = count
            budget -= count
        if not counts:
            assert not self.running, "nobody can move"
            return False
        self._compute(counts, loading)
        return True

    def _compute(self, counts: dict[Request, int], loading: float) -> None:
        rows = [request for request, count in counts.items() if count == 1]
        prompt = sum(count for count in counts.values() if count > 1)
        self.now += loading + self.seconds(prompt, rows)
        for request, count in counts.items():
            request.computed += count
            if request.served.prompt_done < request.prompt:
                self.account.computed(request.served, min(request.computed, request.prompt))
        self.draw([request for request in counts if request.computed == request.tokens])

    def _grow(self, request: Request, positions: int, spare: int = 0) -> bool:
        missing = -(-positions // BLOCK_SIZE) - len(request.blocks)
        if missing > 0 and missing + spare > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._content[block] = (request, len(request.blocks))
            request.blocks.append(block)
        return True

    def _release(self, request: Request) -> None:
        """Its beginning is overwritten last."""
        for block in reversed(request.blocks):
            self._free[block] = None

    def _preempt(self, request: Request) -> None:
        self._release(request)
        super().leave(request)
        self.order.push_back(request)
        self.preemptions += 1

    def _resume(self, request: Request) -> None:
        """Take what is left of the blocks that it had, all but the last token's."""
        had, request.blocks = request.blocks, []
        for index, block in enumerate(had[: min(request.computed, request.tokens - 1) // BLOCK_SIZE]):
            if block not in self._free or self._content[block] != (request, index):
                break
            del self._free[block]
            request.blocks.append(block)
        request.computed = len(request.blocks) * BLOCK_SIZE

    def leave(self, request: Request) -> None:
        self._release(request)
        super().leave(request)


RULES: dict[str, Callable[[Workload, FirstCome, Device, int], Batch]] = {
    "reserved": lambda *given: Reserved(*given, admits_every=10),
    "reserved, every step": lambda *given: Reserved(*given, admits_every=1),
    "as needed": lambda *given: AsNeeded(*given, kept=0),
    "as needed, room kept": lambda *given: AsNeeded(*given, kept=1),
}
AS_NEEDED = [rule for rule in RULES if rule.startswith("as needed")]


def play(workload: Workload, order: str, rule: str, *, device: Device | None = None, seed: int = 0) -> Run:
    """The workload from its start to its end."""
    weights = {a.tenant: workload.weight(a.tenant) for a in workload.arrivals(seed)}
    run = RULES[rule](workload, ORDERS[order](weights), device or Device(), seed).play()
    run.rule = rule
    return run
