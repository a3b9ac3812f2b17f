"""The prompt at the head of its choices' texts."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.api.openai.logprobs import ScoredToken
from loraplex.engine.logprobs import Logprobs
from loraplex.serving.text.processor import Spelling


class Echo:
    """One prompt's text, told in step with its log probabilities where these are wanted: what is known of a token goes
    out with the text that holds the end of it."""

    def __init__(
        self, spelling: Spelling, prompt_ids: Sequence[int], *, scored: bool, num_top: int | None = None
    ) -> None:
        """`num_top`: as many of the most likely tokens are told at most."""
        self._spelling = spelling
        self._prompt_ids = prompt_ids
        self._scored = scored
        self._num_top = num_top
        self._shown = 0
        self._unsent: list[ScoredToken] = []  # known, and not shown yet
        self._num_known = 0
        self._complete = False

    @property
    def complete(self) -> bool:
        """All of it has been told."""
        return self._complete

    def __len__(self) -> int:
        return len(self._spelling.text)

    def take(self, logprobs: Logprobs | None) -> tuple[str, tuple[ScoredToken, ...] | None]:
        """The text that may be shown now that these of the prompt's next tokens are known, and its tokens."""
        text, spans = self._spelling.text, self._spelling.spans
        if not self._scored:
            self._complete = True
            return text, None
        if not self._num_known:
            # Nothing comes before it that could make it likely.
            self._unsent.append(ScoredToken(self._prompt_ids[0], None, (), spans[0][0]))
            self._num_known = 1
        for own, top in () if logprobs is None else logprobs.rows(self._num_top):
            token_id, start = self._prompt_ids[self._num_known], spans[self._num_known][0]
            self._unsent.append(ScoredToken(token_id, own, top, start))
            self._num_known += 1
        self._complete = self._num_known == len(spans)
        shown = len(text) if self._complete else spans[self._num_known][0]
        first = self._num_known - len(self._unsent)
        count = len(self._unsent)
        if not self._complete:
            ends = (end for _, end in spans[first : self._num_known])
            count = next((index for index, end in enumerate(ends) if end > shown), count)
        tokens, self._unsent = tuple(self._unsent[:count]), self._unsent[count:]
        piece, self._shown = text[self._shown : shown], shown
        return piece, tokens
