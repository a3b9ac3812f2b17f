"""The order of service of other policies. Nothing here knows our scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from bench.fairness.account import Served

WINDOW = 5
"""Answers of a tenant whose mean predicts its next, as in VTC's artifact."""


@dataclass(slots=True, eq=False)
class Request:
    """`computed` positions are in the batch's memory. `predicted` output tokens were charged when it was admitted."""

    served: Served
    computed: int = 0
    predicted: float = 0.0
    charged: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.served.number

    @property
    def tenant(self) -> str:
        return self.served.arrival.tenant

    @property
    def adapter(self) -> tuple[str, int]:
        return self.tenant, self.served.arrival.adapter

    @property
    def prompt(self) -> int:
        return self.served.arrival.prompt

    @property
    def tokens(self) -> int:
        """Positions that exist."""
        return self.served.arrival.prompt + self.served.outputs

    @property
    def to_draw(self) -> int:
        """Output tokens that it may yet have, as far as anybody knows."""
        return self.served.arrival.most - self.served.outputs


Fits = Callable[[tuple[str, int]], bool]


class FirstCome:
    """In the order of arrival, for any tenant. What servers without fairness do. A subclass ranks tenants instead."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self.lines: dict[str, dict[int, deque[Request]]] = {tenant: {} for tenant in weights}

    def push(self, request: Request) -> None:
        line = self.lines[request.tenant].setdefault(request.served.arrival.adapter, deque())
        line.append(request)

    def push_back(self, request: Request) -> None:
        """It was preempted, and is before all others of its tenant."""
        line = self.lines[request.tenant].setdefault(request.served.arrival.adapter, deque())
        line.appendleft(request)

    def next(self, fits: Fits) -> Request | None:
        """Of those whose adapter fits."""
        heads = [(self.rank(request), request.number, request) for request in self._heads(fits)]
        return min(heads)[2] if heads else None

    def _heads(self, fits: Fits) -> Iterator[Request]:
        for lines in self.lines.values():
            heads = [line[0] for line in lines.values() if fits(line[0].adapter)]
            if heads:
                yield min(heads, key=lambda request: request.number)

    def take(self, request: Request) -> None:
        lines, adapter = self.lines[request.tenant], request.served.arrival.adapter
        assert lines[adapter].popleft() is request
        if not lines[adapter]:
            del lines[adapter]
        if not request.charged:
            request.charged = True
            self.admitted(request)

    def rank(self, request: Request) -> float:
        """Of a first in line: the least goes next; of equal ones that which came first."""
        return 0.0

    def admitted(self, request: Request) -> None:
        """For the first time."""

    def drew(self, request: Request) -> None:
        """An output token."""

    def ended(self, request: Request) -> None:
        """It has its last token."""


class RoundRobin(FirstCome):
    """One request a tenant in turn, however large it is."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._turns = dict.fromkeys(weights, 0)
        self._count = count(1)

    def rank(self, request: Request) -> float:
        return -1.0 if request.charged else self._turns[request.tenant]  # who was preempted goes on first

    def admitted(self, request: Request) -> None:
        self._turns[request.tenant] = next(self._count)


class LeastCounter(FirstCome):
    """The tenant that got the least service since the beginning, per weight: the prompt is charged when it is admitted,
    output as it is drawn. Without a lift, being away saves up credit."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self.counters = dict.fromkeys(weights, 0.0)

    def rank(self, request: Request) -> float:
        return self.counters[request.tenant]

    def charge(self, request: Request, units: float) -> None:
        self.counters[request.tenant] += units / self.weights[request.tenant]

    def admitted(self, request: Request) -> None:
        self.charge(request, request.served.prompt_price * request.prompt)

    def drew(self, request: Request) -> None:
        self.charge(request, request.served.output_price)


class PlainVtc(LeastCounter):
    """Algorithm 2 of Sheng et al. (OSDI 2024) with weights: as the least counter, and who comes back is lifted to the
    least counter in the queue, or to that of the last tenant that left it."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._last: str | None = None

    def push(self, request: Request) -> None:
        if not self.lines[request.tenant]:
            waiting = [self.counters[tenant] for tenant, lines in self.lines.items() if lines]
            if not waiting and self._last is not None:
                waiting = [self.counters[self._last]]
            own = self.counters[request.tenant]
            self.counters[request.tenant] = max(own, min(waiting, default=own))
        super().push(request)

    def take(self, request: Request) -> None:
        super().take(request)
        if not self.lines[request.tenant]:
            self._last = request.tenant


class PredictingVtc(PlainVtc):
    """VTC with length prediction (the paper's appendix): the predicted output is charged at admission, what is drawn
    beyond it as it comes, and what was not needed is given back at the end. Predicted is the mean of the tenant's last
    answers, 0 for its first."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._answers: dict[str, deque[int]] = {tenant: deque(maxlen=WINDOW) for tenant in weights}

    def predict(self, request: Request) -> float:
        answers = self._answers[request.tenant]
        return sum(answers) / len(answers) if answers else 0.0

    def admitted(self, request: Request) -> None:
        super().admitted(request)
        request.predicted = self.predict(request)
        self.charge(request, request.served.output_price * request.predicted)

    def drew(self, request: Request) -> None:
        if request.served.outputs > request.predicted:
            super().drew(request)

    def ended(self, request: Request) -> None:
        unused = max(0.0, request.predicted - request.served.outputs)
        self.charge(request, -request.served.output_price * unused)
        self._answers[request.tenant].append(request.served.outputs)


class OracleVtc(PredictingVtc):
    """The same, and every prediction is right."""

    def predict(self, request: Request) -> float:
        return float(request.served.arrival.output)
