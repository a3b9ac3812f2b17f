"""The requests of a benchmark and their times: a seeded list, the same for every run with the same options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Distribution = Literal["one", "uniform", "zipf"]
Unit = Literal["words", "tokens"]

# Short common words: with the usual byte-pair vocabularies nearly every one is a single token.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man me even most made after also did many off before must well back through years much "
    "where your way down should because long each just state those people too mr how little good world make "
    "very year still see own work men day get here old life both between being under three never know same last "
    "another while us might great go come since against right came take used himself few house use place during "
    "high without again home around small found thought went say part once general water light sea ship wind"
)
_WORDS = tuple(_TEXT.split())
_FIRST_TOKEN_ID = 1000
"""Below it tokenizers keep their special tokens and single bytes."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Request number `index` (from 0). `arrival_s` is when it is due, in seconds from the start (0 in a closed
    loop, where a request is due as soon as a worker is free). `prompt` is text, or token ids."""

    index: int
    arrival_s: float
    model: str
    prompt: str | list[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """`models` are drawn by `distribution`: the first only, all alike, or Zipf (the k-th with weight 1/k**zipf_alpha).
    `rate` is the mean of a Poisson process in requests a second; None is a closed loop. Prompts have
    `input_len` words or tokens, differ from each other (no prefix cache helps), except the first
    `shared_prefix_len` of them, which all share. `vocab_size` bounds the random token ids."""

    models: tuple[str, ...]
    distribution: Distribution = "uniform"
    zipf_alpha: float = 1.0
    rate: float | None = None
    input_len: int = 64
    shared_prefix_len: int = 0
    unit: Unit = "words"
    vocab_size: int = 30_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a workload needs at least one model")
        if self.unit == "tokens" and self.vocab_size <= _FIRST_TOKEN_ID:
            raise ValueError(f"the vocabulary must have more than {_FIRST_TOKEN_ID} tokens")

    def requests(self) -> Iterator[BenchRequest]:
        """Without end. Times, models and prompts come from generators of their own, so that changing one option
        leaves the others' draws as they were."""
        times = random.Random(f"{self.seed}/times")  # noqa: S311 - reproducible, not secret
        choice = random.Random(f"{self.seed}/models")  # noqa: S311
        models = self.models[:1] if self.distribution == "one" else self.models
        weights = [
            1.0 if self.distribution != "zipf" else (k + 1) ** -self.zipf_alpha for k in range(len(models))
        ]
        cumulative = list(itertools.accumulate(weights))
        arrival = 0.0
        for index in itertools.count():
            if self.rate is not None:
                arrival += times.expovariate(self.rate)
            model = choice.choices(models, cum_weights=cumulative)[0]
            yield BenchRequest(index, arrival, model, self._prompt(index))

    def _prompt(self, index: int) -> str | list[int]:
        shared = min(self.shared_prefix_len, self.input_len)
        common = random.Random(f"{self.seed}/shared")  # noqa: S311
        own = random.Random(f"{self.seed}/prompt/{index}")  # noqa: S311
        if self.unit == "tokens":
            head = [common.randrange(_FIRST_TOKEN_ID, self.vocab_size) for _ in range(shared)]
            return head + [
                own.randrange(_FIRST_TOKEN_ID, self.vocab_size) for _ in range(self.input_len - shared)
            ]
        words = [common.choice(_WORDS) for _ in range(shared)]
        return " ".join(words + [own.choice(_WORDS) for _ in range(self.input_len - shared)])
