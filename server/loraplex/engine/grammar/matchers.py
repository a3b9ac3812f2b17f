"""The matchers of requests, built while the requests wait.

A few threads build them, one at a time each, tenants in turns: a tenant with many or large grammars delays another's by
one build. A tenant's equal texts are built once, and each request gets a copy. Copies share the states of their lexer,
and its limits, so no two tenants have copies of one matcher. llguidance builds without the interpreter lock, and cannot
be interrupted: a build that takes too long fails its requests, and another thread takes the place of the one that is
stuck.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.grammar.dictated import WINDOW_BYTES, DictatesTooMuch, dictated_text, spelled
from loraplex.engine.grammar.tokenizer import new_matcher
from loraplex.engine.grammar.vocabulary import GrammarVocabulary

_log = logging.getLogger(__name__)

BUILD_THREADS = 2
MAX_STUCK = 4
"""Threads that are replaced when they are stuck. After that no grammar is built."""
BUILD_TIMEOUT_S = 30.0
"""Longest time of one build. The API's checker has built each grammar in less."""
MAX_KEPT = 64
MAX_KEPT_CHARS = 4 << 20
"""Grammars that are kept after their last request, and their texts' length together."""


@dataclass(eq=False)
class BuiltGrammar:
    """The state that copies of one matcher share. `fault`: why no request may use it. `is_spent`: a copy has failed,
    perhaps at a limit of the lexer that all copies share; the next request gets one that is built again."""

    fault: str = ""
    is_spent: bool = False


@dataclass(eq=False)
class SequenceMatcher:
    """How far one sequence's tokens have been matched. For one thread at a time.

    `known` are the output tokens that the engine has collected, as far as planned and accepted rows tell; of those that
    a plan has told none is taken back. `_fed` is what `inner` has consumed: of these the first `_sure` are known ones.
    A token behind them was sampled by a step that was not collected when it was fed, and may come out as another one if
    that step is computed again. `mask`, where it is there, is that of the next token. `_ahead` are tokens that must
    come behind the fed ones, as far as they have been asked for.
    """

    inner: LLMatcher
    known: list[int] = field(default_factory=list)
    grammar: BuiltGrammar = field(default_factory=BuiltGrammar)
    mask: NDArray[np.uint32] | None = None
    _fed: list[int] = field(default_factory=list)
    _sure: int = 0
    _ahead: deque[int] = field(default_factory=deque)

    def begin_with(self, tokens: Sequence[int]) -> str | None:
        """Consume the output tokens that there are before the first step. Returns what is wrong, if anything."""
        # One call: a turn through Python for each token takes several times as long, and the step thread waits.
        self.known[:] = self._fed[:] = tokens
        self._sure = len(tokens)
        fits = self.inner.consume_tokens(list(tokens))
        return (
            None if fits else self.failed("the grammar does not allow the tokens that were generated before")
        )

    def move_to(self, count: int, *tokens: int) -> str | None:
        """Consume the first `count` known tokens, and then `tokens`; take back all others. Returns what is wrong, if
        anything: then the matcher is of no use any more."""
        wanted = [*self.known[self._sure : count], *tokens]
        fed, same = self._fed, 0
        behind = fed[self._sure :]
        while same < min(len(behind), len(wanted)) and behind[same] == wanted[same]:
            same += 1
        surplus = len(behind) - same
        if surplus or len(wanted) > same:
            self.mask = None
        if surplus:
            self._ahead.clear()
            if not self.inner.rollback(surplus):
                return self.failed("a token cannot be taken back")
        del fed[self._sure + same :]
        for new in wanted[same:]:
            fed.append(new)
            if self._ahead and self._ahead.popleft() != new:
                self._ahead.clear()
            if not self.inner.consume_token(new):
                return self.failed(f"token {new} is not one that the grammar allows")
        self._sure = count
        return None

    def behind(self, drafted: Sequence[int], vocab_size: int) -> list[SequenceMatcher]:
        """Copies that have consumed the first, the first two … of these tokens, as far as the grammar allows them and
        goes on. `vocab_size`: of the grammar's tokenizer; a token beyond it would spoil the matcher."""
        copies: list[SequenceMatcher] = []
        known = [*takewhile(lambda token: token < vocab_size, drafted)]
        inner = self.inner.deep_copy()
        for token in known[: inner.validate_tokens(known) if known else 0]:
            inner = inner.deep_copy()
            if not inner.consume_token(token) or inner.is_stopped():
                break
            copies.append(SequenceMatcher(inner, grammar=self.grammar))
        return copies

    def dictated(self, tokenizer: LLTokenizer) -> Sequence[int]:
        """Tokens that must follow, the first ones at least; none where nothing is dictated. Raises DictatesTooMuch."""
        if not self._ahead:
            text = self._dictated_text()
            self._ahead.extend(spelled(self.inner, tokenizer, text))
        return self._ahead

    def dictated_token(self, tokenizer: LLTokenizer) -> int | None:
        """The one that must follow, where that is known, or where a mask would cost more than to ask. Raises
        DictatesTooMuch."""
        if not self._ahead and len(self._dictated_text()) <= WINDOW_BYTES:
            return None
        return next(iter(self.dictated(tokenizer)), None)

    def _dictated_text(self) -> bytes:
        if self.grammar.fault:
            raise DictatesTooMuch(self.grammar.fault)
        try:
            return dictated_text(self.inner)
        except DictatesTooMuch as error:
            self.grammar.fault = str(error)
            raise

    def failed(self, otherwise: str = "") -> str:
        """Why it cannot go on, in llguidance's words where it has some."""
        self.grammar.is_spent = True
        return reason_of(self.inner) or otherwise


@dataclass(frozen=True, eq=False)
class _Kept:
    matcher: LLMatcher
    grammar: BuiltGrammar = field(default_factory=BuiltGrammar)

    def copy(self) -> SequenceMatcher:
        return SequenceMatcher(self.matcher.deep_copy(), grammar=self.grammar)


@dataclass(eq=False)
class _Build:
    tenant_id: str
    text: str
    requests: list[str] = field(default_factory=list)
    begun: float | None = None


class GrammarMatchers:
    """`load` reads the tokenizer, in a thread and once; it may raise LoraplexError. `wake` is called from threads when
    `take_built` has news. Everything else belongs to the step thread."""

    def __init__(
        self,
        load: Callable[[], GrammarVocabulary],
        wake: Callable[[], None],
        *,
        build: Callable[[GrammarVocabulary, str], LLMatcher] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._wake = wake
        self._build = build or build_matcher
        self._clock = clock
        self._vocabulary: GrammarVocabulary | LoraplexError | None = None
        self._loading = threading.Lock()
        self._changed = threading.Condition()
        # Under the condition's lock.
        self._queue: OrderedDict[str, deque[_Build]] = OrderedDict()  # by tenant, in turns
        self._builds: dict[tuple[str, str], _Build] = {}  # by tenant and text: queued, or being built
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._ended: list[tuple[str, str | None]] = []
        self._matchers: dict[str, SequenceMatcher] = {}
        self._waiting: dict[str, _Build] = {}  # by request
        self._num_free = 0  # threads that are not stuck
        self._num_stuck = 0
        self._closed = False
        for _ in range(BUILD_THREADS):
            self._start_thread()

    # The step thread.

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """There is one as soon as any matcher is built."""
        assert isinstance(self._vocabulary, GrammarVocabulary)
        return self._vocabulary

    def open(self, request_id: str, tenant_id: str, text: str) -> bool:
        """Whether the request's matcher is there already. Else `take_built` says when it is, or why it will not be."""
        with self._changed:
            kept = self._kept.get((tenant_id, text))
            if kept is not None and kept.grammar.fault:
                self._ended.append((request_id, kept.grammar.fault))
                return False
            if kept is not None and not kept.grammar.is_spent:
                self._kept.move_to_end((tenant_id, text))
                self._matchers[request_id] = kept.copy()
                return True
            if not self._num_free:
                self._ended.append((request_id, "too many grammars before it took too long to build"))
                return False
            build = self._builds.get((tenant_id, text))
            if build is None:
                build = self._builds[tenant_id, text] = _Build(tenant_id, text)
                self._queue.setdefault(tenant_id, deque()).append(build)
                self._changed.notify()
            build.requests.append(request_id)
            self._waiting[request_id] = build
            return False

    def take_built(self) -> list[tuple[str, str | None]]:
        """The requests whose wait has ended since the last call, and why they cannot be served, where that is so."""
        with self._changed:
            self._expire()
            ended, self._ended = self._ended, []
            return ended

    def next_timeout_s(self) -> float | None:
        """Seconds until `take_built` may have news by time alone."""
        with self._changed:
            begun = [build.begun for build in self._builds.values() if build.begun is not None]
        return max(0.0, min(begun) + BUILD_TIMEOUT_S - self._clock()) if begun else None

    def matcher(self, request_id: str) -> SequenceMatcher:
        """The matcher of a request whose wait has ended well, and that was not closed."""
        return self._matchers[request_id]

    def resume(self, request_id: str, token_ids: Sequence[int]) -> tuple[bool, str | None]:
        """The answer of a request with a matcher goes on behind `token_ids`. Returns whether its grammar ends with
        them, and what is wrong, if anything. Nothing of the request may have been planned yet."""
        matcher = self._matchers[request_id]
        error = matcher.begin_with(token_ids)
        return error is None and matcher.inner.is_stopped(), error

    def close_request(self, request_id: str) -> None:
        """A request has ended, whatever it had."""
        with self._changed:
            self._matchers.pop(request_id, None)
            build = self._waiting.pop(request_id, None)
            if build is not None:
                build.requests.remove(request_id)
            self._ended = [(other, error) for other, error in self._ended if other != request_id]

    def close(self) -> None:
        """End the threads, as soon as they are done with what they build."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _expire(self) -> None:
        latest = self._clock() - BUILD_TIMEOUT_S
        late = [b for b in self._builds.values() if b.begun is not None and b.begun <= latest]
        for build in late:
            _log.error(
                "a grammar of %d characters is still being built after %g s", len(build.text), BUILD_TIMEOUT_S
            )
            self._end(build, f"the grammar was not built within {BUILD_TIMEOUT_S:g} s; make it simpler")
            self._num_free -= 1
            self._num_stuck += 1
            if self._num_stuck <= MAX_STUCK:
                self._start_thread()

    def _end(self, build: _Build, error: str | None) -> None:
        del self._builds[build.tenant_id, build.text]
        for request_id in build.requests:
            del self._waiting[request_id]
            self._ended.append((request_id, error))

    # The threads.

    def _start_thread(self) -> None:
        self._num_free += 1
        threading.Thread(target=self._serve, name="grammar-build", daemon=True).start()

    def _serve(self) -> None:
        self._load_once()
        while (build := self._next()) is not None:
            outcome = self._try(build.text)
            with self._changed:
                kept = None if isinstance(outcome, str) else self._keep(build, outcome)
                if self._builds.get((build.tenant_id, build.text)) is not build:
                    # It took too long, and has ended all the same.
                    self._num_stuck -= 1
                    if self._num_free == BUILD_THREADS:
                        return
                    self._num_free += 1
                    continue
                if kept is not None:
                    for request_id in build.requests:
                        self._matchers[request_id] = kept.copy()
                self._end(build, outcome if isinstance(outcome, str) else None)
            self._wake()

    def _next(self) -> _Build | None:
        """The next build, begun; None at the end."""
        with self._changed:
            while not self._closed:
                for tenant_id in list(self._queue):
                    queued = self._queue.pop(tenant_id)
                    build = queued.popleft()
                    if queued:
                        self._queue[tenant_id] = queued  # last in turn now
                    if build.requests:
                        build.begun = self._clock()
                        return build
                    del self._builds[build.tenant_id, build.text]
                if not self._queue:
                    self._changed.wait()
        return None

    def _try(self, text: str) -> LLMatcher | str:
        """A matcher, or what is wrong with the grammar."""
        if isinstance(self._vocabulary, LoraplexError):
            return self._vocabulary.message
        try:
            matcher = self._build(self.vocabulary, text)
            if not (reason := reason_of(matcher)):
                dictated_text(matcher)
            return reason or matcher
        except DictatesTooMuch as error:
            return str(error)
        except Exception as error:  # a Rust library's
            _log.exception("a grammar of %d characters could not be built", len(text))
            return f"{type(error).__name__}: {error}"

    def _load_once(self) -> None:
        with self._loading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._load()
                except LoraplexError as error:
                    _log.warning("%s", error)
                    self._vocabulary = error

    def _keep(self, build: _Build, matcher: LLMatcher) -> _Kept:
        kept = self._kept[build.tenant_id, build.text] = _Kept(matcher)
        self._kept.move_to_end((build.tenant_id, build.text))
        while len(self._kept) > MAX_KEPT or sum(len(text) for _, text in self._kept) > MAX_KEPT_CHARS:
            self._kept.popitem(last=False)
        return kept


def reason_of(matcher: LLMatcher) -> str:
    """The fault of a grammar, or of its use, in one line; empty if there is none."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def build_matcher(vocabulary: GrammarVocabulary, text: str) -> LLMatcher:
    """The matcher, with what its first mask takes computed: no step waits for that."""
    matcher = new_matcher(vocabulary.tokenizer, text)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher
