"""Matchers of requests: built while these wait, moved to and fro with their tokens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.grammar import matchers as module
from loraplex.engine.grammar.dictated import MAX_DICTATED_BYTES, WINDOW_BYTES, DictatesTooMuch
from loraplex.engine.grammar.matchers import BuiltGrammar, GrammarMatchers, SequenceMatcher, build_matcher
from loraplex.engine.grammar.tokenizer import GrammarsUnsupported, load_grammar_tokenizer, new_matcher
from loraplex.engine.grammar.vocabulary import GrammarVocabulary
from support.engine.grammars import VOCAB_SIZE
from support.models.byte_tokenizer import EOS_ID, byte_encode, write_byte_tokenizer

GRAMMAR = "start: /(ab|cd)+/"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    model_dir = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    return GrammarVocabulary(load_grammar_tokenizer(model_dir, [EOS_ID, 9999]), VOCAB_SIZE)


def mask_of(matcher: LLMatcher) -> bytes:
    return matcher.compute_bitmask()


# One sequence.


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_a_matcher_is_where_its_tokens_are(vocabulary: GrammarVocabulary, moves) -> None:
    """Whatever was fed of tokens that came out otherwise, or was fed twice: as if the tokens had come one by one."""
    inner = new_matcher(vocabulary.tokenizer, "start: /[a-d]+/")
    matcher = SequenceMatcher(inner)
    for grow, guess, wrong in moves:
        matcher.known += [97 + (len(matcher.known) + i) % 4 for i in range(grow)]
        count = len(matcher.known)
        token = None
        if guess:
            token = 97 + count % 4 if not wrong else 97 + (count + 1) % 4
        assert matcher.move_to(count, *([] if token is None else [token])) is None
        fresh = new_matcher(vocabulary.tokenizer, "start: /[a-d]+/")
        assert fresh.consume_tokens([*matcher.known, *([] if token is None else [token])])
        assert mask_of(inner) == mask_of(fresh)


def test_an_end_can_be_taken_back(vocabulary: GrammarVocabulary) -> None:
    matcher = SequenceMatcher(new_matcher(vocabulary.tokenizer, 'start: "ab" | "ac"'), known=[97])
    assert matcher.move_to(1, 98) is None
    assert matcher.inner.is_stopped()
    assert matcher.move_to(1) is None
    assert not matcher.inner.is_stopped()
    assert matcher.move_to(1, 99) is None
    assert matcher.inner.is_stopped()


def test_a_token_that_the_grammar_bars_is_an_error(vocabulary: GrammarVocabulary) -> None:
    matcher = SequenceMatcher(new_matcher(vocabulary.tokenizer, GRAMMAR))
    assert "doesn't satisfy the grammar" in (matcher.move_to(0, 120) or "")
    assert matcher.move_to(0) is not None


class Spelling:
    """A matcher and its tokenizer, and the bytes that they were asked to spell."""

    def __init__(self, vocabulary: GrammarVocabulary, text: str) -> None:
        self._inner = new_matcher(vocabulary.tokenizer, text)
        self._tokenizer = vocabulary.tokenizer
        self.num_bytes = 0

    def compute_ff_tokens(self) -> list[int]:
        self.num_bytes += len(self._inner.compute_ff_bytes())
        return self._inner.compute_ff_tokens()

    def tokenize_partial(self, text: bytes) -> tuple[list[int], bytes]:
        self.num_bytes += len(text)
        return self._tokenizer.tokenize_partial(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("length", [20, 500, 3000, 8000])
def test_a_dictated_text_is_spelled_once_however_many_steps_take_it(
    vocabulary: GrammarVocabulary, length: int
) -> None:
    text = "".join(chr(97 + place % 26) for place in range(length))
    spelling: Any = Spelling(vocabulary, f'start: "{text}" /[ab]/')
    matcher, taken = SequenceMatcher(spelling), []
    while follows := list(itertools.islice(matcher.dictated(spelling), 32)):
        # Of a long text no step spells more than a window.
        assert len(matcher.dictated(spelling)) <= WINDOW_BYTES
        matcher.known += follows
        assert matcher.move_to(len(matcher.known)) is None
        taken += follows
    assert bytes(taken).decode() == text
    # Text that follows may change the spelling of a window's end: it is spelled again with the next.
    assert spelling.num_bytes <= 1.1 * length


def test_a_token_off_the_dictated_ones_forgets_them(vocabulary: GrammarVocabulary) -> None:
    """As where a step is void, and another token comes out."""
    matcher = SequenceMatcher(
        new_matcher(vocabulary.tokenizer, 'start: "a" ("bcd" | "xyz") "end"'), known=[97]
    )
    assert matcher.move_to(1, 98) is None
    assert list(matcher.dictated(vocabulary.tokenizer)) == byte_encode("cdend")
    assert matcher.move_to(1, 120) is None
    assert list(matcher.dictated(vocabulary.tokenizer)) == byte_encode("yzend")


def test_a_text_that_is_too_long_is_found_once(vocabulary: GrammarVocabulary) -> None:
    built = BuiltGrammar()
    text = f'start: /[ab]/ "{"x" * (MAX_DICTATED_BYTES + 1)}"'
    first = SequenceMatcher(new_matcher(vocabulary.tokenizer, text), grammar=built)
    second: Any = Spelling(vocabulary, text)
    second.compute_ff_bytes = pytest.fail
    assert first.move_to(0, 97) is None
    with pytest.raises(DictatesTooMuch, match="dictates 8193 bytes at one place, and may dictate 8192"):
        first.dictated_token(vocabulary.tokenizer)
    with pytest.raises(DictatesTooMuch):
        SequenceMatcher(second, grammar=built).dictated(vocabulary.tokenizer)


# Many requests.


class Builds:
    """Builds that a test holds up: those whose text is in `held` wait for `go`."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.go = threading.Event()
        self.begun: list[str] = []

    def __call__(self, vocabulary: GrammarVocabulary, text: str) -> LLMatcher:
        self.begun.append(text)
        if text in self.held:
            assert self.go.wait(WAIT_S)
        return build_matcher(vocabulary, text)


class Desk:
    """`GrammarMatchers` with builds that can be held up, a clock that the test owns, and what has come of requests."""

    def __init__(self, load: Callable[[], GrammarVocabulary]) -> None:
        self.builds = Builds()
        self.now = 0.0
        self.woken = threading.Event()
        self.matchers = GrammarMatchers(load, self.woken.set, build=self.builds, clock=lambda: self.now)
        self.ended: dict[str, str | None] = {}

    def wait_for(self, *names: str) -> None:
        while not set(names) <= self.ended.keys():
            assert self.woken.wait(WAIT_S), f"{names} were not built"
            self.woken.clear()
            self.take()

    def wait_until_begun(self, count: int) -> None:
        """Builds are begun by threads, which tell nobody: poll."""
        for _ in range(int(WAIT_S * 1000)):
            if len(self.builds.begun) >= count:
                return
            threading.Event().wait(0.001)
        raise AssertionError("a build was not begun")

    def take(self) -> None:
        self.ended |= dict(self.matchers.take_built())


@pytest.fixture
def desk(vocabulary: GrammarVocabulary) -> Iterator[Desk]:
    desk = Desk(lambda: vocabulary)
    yield desk
    desk.builds.go.set()
    desk.matchers.close()


def test_a_tenants_equal_grammars_are_built_once_and_shared_by_nobody(
    desk: Desk, vocabulary: GrammarVocabulary
) -> None:
    for name in ("a", "b"):
        desk.matchers.open(name, "acme", GRAMMAR)
    desk.wait_for("a", "b")
    assert desk.matchers.open("c", "acme", GRAMMAR)
    assert desk.builds.begun == [GRAMMAR]
    assert desk.matchers.matcher("a").move_to(0, 97) is None
    fresh = mask_of(new_matcher(vocabulary.tokenizer, GRAMMAR))
    assert mask_of(desk.matchers.matcher("a").inner) != fresh
    assert [mask_of(desk.matchers.matcher(name).inner) for name in ("b", "c")] == [fresh, fresh]


def test_a_tenant_that_uses_up_a_lexer_fails_nobody_else(desk: Desk) -> None:
    """Copies of a matcher share their lexer's states, and its limits."""
    pattern = "start: /[gh]a{7000}b/"
    for tenant in ("acme", "other"):
        desk.matchers.open(tenant, tenant, pattern)
    desk.wait_for("acme", "other")
    spent = desk.matchers.matcher("acme")
    assert spent.move_to(0, 103) is None
    assert spent.inner.compute_ff_bytes()
    assert "lexer error" in (spent.move_to(0, 104, 97) or spent.failed() or "")
    assert desk.matchers.matcher("other").move_to(0, 103, *[97] * 3000) is None
    # The next request of the same tenant gets a lexer of its own.
    assert not desk.matchers.open("again", "acme", pattern)
    desk.wait_for("again")
    assert desk.matchers.matcher("again").move_to(0, 103, *[97] * 3000) is None


def test_a_grammar_that_cannot_be_built_says_why(desk: Desk) -> None:
    assert not desk.matchers.open("a", "acme", "start: nosuch")
    desk.wait_for("a")
    assert desk.ended["a"] is not None
    assert 'unknown name: "nosuch"' in desk.ended["a"]
    assert "\n" not in desk.ended["a"]
    # It is not kept as if it were one.
    assert not desk.matchers.open("b", "acme", "start: nosuch")
    desk.wait_for("b")


def test_tenants_take_turns(desk: Desk) -> None:
    """Two threads: two builds that do not end hold both, and what waits behind them is served in turns."""
    desk.builds.held = {"start: /x/", "start: /y/"}
    desk.matchers.open("x", "many", "start: /x/")
    desk.matchers.open("y", "many", "start: /y/")
    desk.wait_until_begun(2)
    texts = [f'start: "{number}"' for number in range(5)]
    for number, text in enumerate(texts):
        desk.matchers.open(f"many-{number}", "many", text)
    desk.matchers.open("few", "few", 'start: "few"')
    desk.matchers.open("also", "also", texts[4])  # which the other has queued last
    desk.builds.go.set()
    desk.wait_for("few", "also", "many-4", "many-3")
    order = desk.builds.begun[2:]
    assert order.index('start: "few"') <= 2
    assert order.index(texts[4]) <= 3
    assert sorted(order) == sorted([*texts, texts[4], 'start: "few"'])


def test_what_is_closed_is_not_heard_of_again(desk: Desk) -> None:
    desk.builds.held = {GRAMMAR, "start: /x/"}
    desk.matchers.open("building", "acme", GRAMMAR)
    desk.matchers.open("blocks", "acme", "start: /x/")
    desk.wait_until_begun(2)
    desk.matchers.open("queued", "acme", 'start: "never"')
    for name in ("building", "queued"):
        desk.matchers.close_request(name)
    desk.builds.go.set()
    desk.matchers.open("last", "acme", 'start: "last"')
    desk.wait_for("blocks", "last")
    assert desk.ended.keys() == {"blocks", "last"}
    assert 'start: "never"' not in desk.builds.begun
    # It was built all the same, and kept; or is being built still.
    if not desk.matchers.open("again", "acme", GRAMMAR):
        desk.wait_for("again")
    assert desk.builds.begun.count(GRAMMAR) == 1


def test_what_ended_before_it_was_closed_is_not_heard_of_either(desk: Desk) -> None:
    desk.matchers.open("a", "acme", GRAMMAR)
    assert desk.woken.wait(WAIT_S)
    desk.matchers.close_request("a")
    desk.builds.held = {"start: /x/"}
    desk.matchers.open("a", "acme", "start: /x/")
    desk.take()
    assert desk.ended == {}


def test_a_build_without_end_fails_its_request_and_no_other(desk: Desk) -> None:
    stuck = [f"start: /x{number}/" for number in range(module.BUILD_THREADS)]
    desk.builds.held = set(stuck)
    for text in stuck:
        desk.matchers.open(text, "acme", text)
    desk.wait_until_begun(len(stuck))
    assert desk.matchers.next_timeout_s() == module.BUILD_TIMEOUT_S
    desk.now += module.BUILD_TIMEOUT_S - 1
    desk.take()
    assert desk.ended == {}
    desk.now += 1
    desk.take()
    assert all("was not built within 30 s" in (desk.ended[text] or "") for text in stuck)
    assert desk.matchers.next_timeout_s() is None
    desk.matchers.open("other", "acme", GRAMMAR)
    desk.wait_for("other")
    assert desk.ended["other"] is None


def test_when_all_threads_are_stuck_requests_are_told_at_once(desk: Desk) -> None:
    for number in range(module.BUILD_THREADS + module.MAX_STUCK):
        text = f"start: /x{number}/"
        desk.builds.held |= {text}
        desk.matchers.open(text, "acme", text)
        desk.wait_until_begun(number + 1)
        desk.now += module.BUILD_TIMEOUT_S
        desk.take()
    assert not desk.matchers.open("late", "acme", GRAMMAR)
    desk.take()
    assert "took too long to build" in (desk.ended["late"] or "")
    # Those that end after all are threads again.
    desk.builds.go.set()
    for number in range(module.BUILD_THREADS + module.MAX_STUCK):
        while not desk.matchers.open(f"{number}", "acme", f"start: /x{number}/"):
            desk.matchers.close_request(f"{number}")
            threading.Event().wait(0.001)
    desk.matchers.open("after", "acme", GRAMMAR)
    desk.wait_for("after")
    assert desk.ended["after"] is None


def test_a_grammar_that_dictates_too_much_is_refused_then_and_there(desk: Desk) -> None:
    later = f'start: /[ab]/ "{"x" * 9000}"'
    desk.matchers.open("at once", "acme", f'start: "{"x" * 9000}"')
    desk.matchers.open("later", "acme", later)
    desk.wait_for("at once", "later")
    assert "dictates 9000 bytes" in (desk.ended["at once"] or "")
    assert desk.ended["later"] is None
    matcher = desk.matchers.matcher("later")
    assert matcher.move_to(0, 97) is None
    with pytest.raises(DictatesTooMuch):
        matcher.dictated(desk.matchers.vocabulary.tokenizer)
    # No other request of it takes a step.
    assert not desk.matchers.open("again", "acme", later)
    desk.take()
    assert "dictates 9000 bytes" in (desk.ended["again"] or "")


def test_few_grammars_are_kept(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    texts = [f'start: "{number}"' for number in range(4)]
    for number, text in enumerate(texts):
        desk.matchers.open(str(number), "acme", text)
        desk.wait_for(str(number))
    assert [desk.matchers.open(f"again-{n}", "acme", text) for n, text in enumerate(texts)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_tokenizer_that_takes_no_grammars_refuses_each(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def load() -> GrammarVocabulary:
        return GrammarVocabulary(load_grammar_tokenizer(tmp_path, [0]), 10)

    with pytest.raises(GrammarsUnsupported, match="no grammar can be used with this model's tokenizer"):
        load()
    desk = Desk(load)
    try:
        desk.matchers.open("a", "acme", GRAMMAR)
        desk.wait_for("a")
        assert "no grammar can be used" in (desk.ended["a"] or "")
        assert str(tmp_path) not in (desk.ended["a"] or "")
    finally:
        desk.matchers.close()


def test_other_errors_of_the_library_end_one_request(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(vocabulary: GrammarVocabulary, text: str) -> LLMatcher:
        raise LoraplexError("no more memory")

    monkeypatch.setattr(desk.matchers, "_build", broken)
    desk.matchers.open("a", "acme", GRAMMAR)
    desk.wait_for("a")
    assert "no more memory" in (desk.ended["a"] or "")
    monkeypatch.setattr(desk.matchers, "_build", build_matcher)
    desk.matchers.open("b", "acme", GRAMMAR)
    desk.wait_for("b")
    assert desk.ended["b"] is None


# Masks.


def test_dictated_text_is_spelled_by_ordinary_tokens(vocabulary: GrammarVocabulary) -> None:
    matcher = new_matcher(vocabulary.tokenizer, 'start: "<|end|>" <|start|>')
    words = np.zeros(vocabulary.num_words, dtype=np.uint32)
    spelled = []
    for want in [*byte_encode("<|end|>"), 257]:
        words[:] = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        vocabulary.allow_dictated_text(matcher, words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert want in allowed
        spelled.append(allowed)
        assert matcher.consume_token(want)
    assert spelled[0] == [ord("<")]
    assert spelled[-1] == [257]
    assert matcher.is_stopped()
