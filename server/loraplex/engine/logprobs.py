"""Log probabilities on their way from a step to the client. No torch.

They are packed, because there may be many: a prompt of 8,192 tokens with five alternatives each takes 0.35 MB so, and
forty times as much as Python objects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
"""Alternatives a token."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Tokens whose log probabilities a request may ask for at each position."""


ScoreRow = tuple[float, tuple[tuple[int, float], ...]]
"""A token's own log probability, and (token id, log probability) of the most likely ones at its place."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities, for n tokens that follow each other.

    `values`: float32 [n, 1 + num_top], little-endian: of the token itself, then of the `num_top` most likely ones at
    its place, the likeliest first, and behind them of those that the request names, which `num_top` counts too. `ids`:
    int32 [n, num_top], little-endian: which these are. `ranks`: int32 [n], little-endian: how many tokens are as likely
    as the token itself at least; empty where they were not requested.
    """

    num_top: int
    values: bytes
    ids: bytes
    ranks: bytes = b""

    def __len__(self) -> int:
        return len(self.values) // (4 * (1 + self.num_top))

    def part(self, start: int, end: int) -> Logprobs:
        """Those of tokens start … end-1."""
        row, top = 4 * (1 + self.num_top), 4 * self.num_top
        values, ids = self.values[start * row : end * row], self.ids[start * top : end * top]
        return Logprobs(self.num_top, values, ids, self.ranks[4 * start : 4 * end])

    def token_ranks(self) -> Sequence[int]:
        return struct.unpack(f"<{len(self.ranks) // 4}i", self.ranks)

    def rows(self, num_top: int | None = None) -> Iterator[ScoreRow]:
        """With at most `num_top` of the most likely tokens, all by default."""
        ids = struct.unpack(f"<{len(self.ids) // 4}i", self.ids)
        count = self.num_top if num_top is None else min(num_top, self.num_top)
        first = 0
        for own, *top in struct.iter_unpack(f"<{1 + self.num_top}f", self.values):
            yield own, tuple(zip(ids[first : first + count], top[:count], strict=True))
            first += self.num_top


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities that came for one request: of output tokens, and of prompt tokens. None where there are none
    of the kind."""

    output: Logprobs | None = None
    prompt: Logprobs | None = None

    @property
    def num_values(self) -> int:
        return sum(len(part.values) // 4 for part in (self.output, self.prompt) if part is not None)


def join_scores(parts: Sequence[Scores]) -> Scores | None:
    """The scores of one request, concatenated; None where there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Scores(_join([part.output for part in parts]), _join([part.prompt for part in parts]))


def _join(parts: Sequence[Logprobs | None]) -> Logprobs | None:
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    return Logprobs(
        there[0].num_top,
        b"".join(part.values for part in there),
        b"".join(part.ids for part in there),
        b"".join(part.ranks for part in there),
    )


def cut_scores(scores: Scores | None, start: int, end: int) -> Scores | None:
    """With those of output tokens start … end-1 alone."""
    if scores is None or scores.output is None:
        return scores
    return Scores(scores.output.part(start, end), scores.prompt)


def wrong_scores(scores: Scores | None, num_output: int, num_prompt: int) -> str | None:
    """The fault of the scores of one slice, if `num_output` and `num_prompt` were asked for."""
    scores = scores or Scores()
    for what, found, wanted in (("output", scores.output, num_output), ("prompt", scores.prompt, num_prompt)):
        num_found = 0 if found is None else len(found)
        if num_found != wanted:
            return f"{num_found} log probabilities of {what} tokens came for {wanted}"
    return None
