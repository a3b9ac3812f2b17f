"""A tokenizer's tokens as masks name them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

SPECIAL = 0xFF
"""The byte that llguidance puts before the name of a special token, in what a grammar dictates."""


@dataclass(frozen=True)
class GrammarVocabulary:
    """`vocab_size` is the model's: with padding, or without tokens that the tokenizer has."""

    tokenizer: LLTokenizer
    vocab_size: int

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask of the tokenizer's."""
        return -(-self.tokenizer.vocab_size // 32)

    @cached_property
    def known(self) -> NDArray[np.uint32] | None:
        """[num_words]: the tokens that the model has, or None if it has all."""
        size = self.tokenizer.vocab_size
        if self.vocab_size >= size:
            return None
        return pack_bits(range(self.vocab_size), self.num_words)

    def allow_dictated_text(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> None:
        """Put a mask right that allows one special token alone, where the grammar has ordinary text.

        Where a grammar dictates the next bytes, llguidance allows only the token that its tokenizer gives for them.
        That may be a special token with this spelling, which llguidance then refuses, and which would not be text in
        the answer. Every ordinary token with which the dictated text begins is allowed instead.
        """
        places = np.flatnonzero(words)
        if len(places) != 1 or words[places[0]].bit_count() != 1:
            return
        token = 32 * int(places[0]) + int(words[places[0]]).bit_length() - 1
        if not self.tokenizer.is_special_token(token):
            return
        text = matcher.compute_ff_bytes()
        if text and text[0] != SPECIAL:
            longest = min(len(text), self._longest)
            found = [self._by_bytes.get(text[:size]) for size in range(1, longest + 1)]
            words[:] = pack_bits([token for token in found if token is not None], self.num_words)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        tokenizer = self.tokenizer
        ordinary = (i for i in range(tokenizer.vocab_size) if not tokenizer.is_special_token(i))
        return {tokenizer.decode_bytes([i]): i for i in ordinary}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))


def pack_bits(tokens: range | list[int], num_words: int) -> NDArray[np.uint32]:
    """[num_words]: the bits of these tokens set."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def clear_bits(words: NDArray[np.uint32], tokens: list[int]) -> bool:
    """Bar these tokens; those beyond the mask are passed over. Whether any was allowed before."""
    found = False
    for token in tokens:
        if 0 <= token < 32 * len(words):
            word, bit = int(words[token // 32]), 1 << token % 32
            if word & bit:
                words[token // 32] = word ^ bit
                found = True
    return found
