"""Drafters to plant into histories: always right, always wrong, and by chance."""

from __future__ import annotations

import random
from typing import Literal

from loraplex.engine.scheduling.drafting import Draft, Drafter, DraftSource
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.types import Sequence
from support.engine.fake_runner import reference

DrafterKind = Literal["right", "wrong", "random"]
KINDS: tuple[DrafterKind, ...] = ("right", "wrong", "random")
FREE = StepCosts((1.0,) * 64)
"""Costs at which every draft is taken for which there is room."""


class PlantedDrafter(Drafter):
    """Knows the tokens of the fake model. `log` has the drafted and the accepted tokens of each verified draft, and
    `num_behind_end` counts the accepted ones behind the end of an answer."""

    def __init__(self, kind: DrafterKind, rng: random.Random, vocab_size: int) -> None:
        super().__init__(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
        self._kind = kind
        self._rng = rng
        self._vocab_size = vocab_size
        self._answers: dict[str, list[int]] = {}
        self.log: list[tuple[int, int]] = []
        self.complaints: list[str] = []
        self.num_behind_end = 0
        self._first: dict[Sequence, int] = {}

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        request, first = seq.request, seq.num_outputs
        if request.is_shadow or not request.speculation or seq.num_pending != 1:
            self.complaints.append(f"a draft of {request.request_id} is wanted that may have none")
        if most < 1 or first + most >= request.sampling.max_tokens:
            self.complaints.append(
                f"{most} drafts are wanted behind {first} of {request.sampling.max_tokens}"
            )
        guessed = self._answer(seq)[first : first + most]
        if self._kind == "random":
            guessed = guessed[: self._rng.randint(0, most)]
        guessed = [token if self._is_right() else (token + 1) % self._vocab_size for token in guessed]
        if not guessed:
            return None
        self._first[seq] = first
        return Draft(tuple(guessed), tuple(0.9**place for place in range(len(guessed))), "own")

    def verified(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        if not 0 <= num_accepted <= num_drafted > 0:
            self.complaints.append(f"{num_accepted} of {num_drafted} drafts were accepted")
        self.log.append((num_drafted, num_accepted))
        self.num_behind_end += max(0, num_accepted - (seq.num_outputs - self._first.pop(seq)))
        super().verified(seq, source, num_drafted, num_accepted)

    def _is_right(self) -> bool:
        return self._kind == "right" or (self._kind == "random" and self._rng.random() < 0.7)

    def _answer(self, seq: Sequence) -> list[int]:
        """The whole answer, as the fake model gives it."""
        request = seq.request
        answer = self._answers.get(request.request_id)
        if answer is None:
            digest = None if request.adapter is None else request.adapter.digest
            count = request.sampling.max_tokens
            answer = reference(digest, request.prompt_ids, count, self._vocab_size, request.adapter_from)
            self._answers[request.request_id] = answer
        return answer
