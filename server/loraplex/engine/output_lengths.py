"""How long a tenant's answers are, learnt from those that ended."""

from __future__ import annotations

from collections import OrderedDict

from loraplex.engine.types import Sequence

RATE = 0.1
"""Share of the newest answer in a running mean: about the last ten count."""
FIRST_GUESS = 128.0
"""Tokens, while no answer has ended yet."""
MAX_TENANTS = 4096


class OutputLengths:
    """A running mean of output tokens for each tenant, and one of all for tenants not known (any more): at most
    `MAX_TENANTS` are remembered, those that ended something last."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._means: OrderedDict[str, float] = OrderedDict()

    def learn(self, seq: Sequence) -> None:
        """A request has ended, by itself or by its client, with so many tokens."""
        length = float(seq.num_outputs)
        tenant_id = seq.request.tenant_id
        self._mean = length if self._mean is None else self._mean + RATE * (length - self._mean)
        mean = self._means.pop(tenant_id, None)
        self._means[tenant_id] = length if mean is None else mean + RATE * (length - mean)
        if len(self._means) > MAX_TENANTS:
            self._means.popitem(last=False)

    def predict(self, seq: Sequence) -> float:
        """Output tokens that a request will have had at its end, at least those that it has and at most those that
        it may have."""
        sampling = seq.request.sampling
        if sampling.ignore_eos and not sampling.stop_token_ids:
            return float(sampling.max_tokens)
        guess = self._means.get(seq.request.tenant_id, FIRST_GUESS if self._mean is None else self._mean)
        return max(float(seq.num_outputs), min(max(guess, sampling.min_tokens), float(sampling.max_tokens)))
