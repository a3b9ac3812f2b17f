"""Differences between tokenizers that have the same vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from loraplex.serving.text.tokenizer_comparison import compare

LETTERS = {"q": 0, "z": 1, "x": 2, "qz": 3, "zx": 4, "merges": 5, '"merges":': 6}


def bpe(*merges: tuple[str, str], **options: bool) -> Tokenizer:
    return Tokenizer(models.BPE(vocab=LETTERS, merges=list(merges), **options))


def unigram(*scores: float, unk_id: int = 0) -> Tokenizer:
    names = ("<unk>", "He", "l", "o", '"unk_id":')
    return Tokenizer(models.Unigram(list(zip(names, scores, strict=False)), unk_id, False))


def piece(longest: int) -> Tokenizer:
    return Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a", max_input_chars_per_word=longest))


@pytest.mark.parametrize(
    ("ours", "theirs", "part"),
    [
        (bpe(("q", "z"), ("z", "x")), bpe(("z", "x"), ("q", "z")), "merges"),
        (bpe(("q", "z"), ("z", "x")), bpe(("q", "z")), "merges"),
        (bpe(("q", "z")), bpe(("q", "z"), byte_fallback=True), "model"),
        (unigram(0.0, -1.0, -2.0, -3.0, -4.0), unigram(0.0, -1.0, -2.0, -3.5, -4.0), "scores"),
        (unigram(0.0, -1.0, -2.0, -3.0), unigram(0.0, -1.0, -2.0, -3.0, unk_id=1), "scores"),
        (piece(100), piece(9), "model"),
    ],
)
def test_how_words_are_parted_is_compared_beside_the_vocabulary(
    ours: Tokenizer, theirs: Tokenizer, part: str
) -> None:
    found = compare(ours, theirs)
    assert found is not None
    assert (found.missing, found.parts) == ((), (part,))
    assert found.told("here", "there")
    for same in (ours, theirs):
        assert compare(same, Tokenizer.from_str(same.to_str())) is None
