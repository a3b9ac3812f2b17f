"""Acceptance of drafted tokens: from the rows that a step samples to the tokens of its slices.

A row of a slice with drafts assumes the drafted tokens before it. The noise of a draw depends on seed, choice and
output index alone, so the token that a row samples is the one that would have been sampled without drafts wherever all
that it assumes is right. A draft is accepted while the tokens sampled at its places equal it, at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from loraplex.engine.logprobs import Scores
from loraplex.engine.sampling.batch import AskedScores
from loraplex.engine.sampling.scoring import TokenScores, pack, pack_listed


def accepted_tokens(
    token_ids: list[tuple[int, ...]],
    sampled: Sequence[int],
    drafted: Mapping[int, tuple[int, ...]],
    rows: Iterable[tuple[int, bool]],
    failed: dict[int, str],
) -> list[tuple[int, ...]]:
    """Fill and return `token_ids`, by slice: of one with drafts those that were sampled as drafted, and the one behind
    them. `sampled` are the slices of the rows, adjacent for each slice, and `rows` their tokens with whether these are
    good. A slice is put into `failed` if a row is not whose token it needs."""
    offset, last = 0, -1
    for index, (token, ok) in zip(sampled, rows, strict=True):
        offset = offset + 1 if index == last else 0
        last = index
        if index in failed or token_ids[index] != drafted.get(index, ())[:offset]:
            continue
        if ok:
            token_ids[index] += (token,)
        else:
            failed[index] = "the logits of this row are not finite, or its options left no token to draw"
            token_ids[index] = ()
    return token_ids


def add_output_scores(
    found: dict[int, Scores],
    asked: AskedScores,
    output: TokenScores,
    sampled: Sequence[int],
    token_ids: Sequence[tuple[int, ...]],
) -> None:
    """Add the scores of the `token_ids` of each slice that asks for them; there are none of one that failed."""
    scores = output.numpy()
    start = 0
    while start < len(asked.sampled):
        index, end = sampled[asked.sampled[start]], start + 1
        while end < len(asked.sampled) and sampled[asked.sampled[end]] == index:
            end += 1
        if count := len(token_ids[index]):
            rows, named = slice(start, start + count), asked.lists[start]
            packed = pack_listed(scores, rows, named) if named else pack(scores, rows, asked.num_top[start])
            found[index] = replace(found.get(index, Scores()), output=packed)
        start = end
