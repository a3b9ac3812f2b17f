"""Guessed tokens: where they come from, what they promise, and who never sees them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.scheduling.drafting import MAX_DRAFT, Draft, Drafter
from loraplex.engine.scheduling.drafting.drafter import MAX_ANSWER, MAX_LEARNED
from loraplex.engine.types import Sequence
from support.drafts import ONE, OTHER, drafter, finish, sequence, tokens_of


def is_nonsense(drafts: Drafter, seq: Sequence, turns: int, least: float) -> int:
    """How many rows are lost where each draft that promises `least` for its first token is taken, and is wrong."""
    taken = 0
    for _ in range(turns):
        seq.token_ids.append(seq.token_ids[-2])
        draft = drafts.propose(seq, 4)
        if draft is not None and draft.gains[0] >= least:
            taken += 1
            drafts.verified(seq, draft.source, 1, 0)
    return taken


# Where they come from.


def test_what_followed_the_longest_match_is_proposed() -> None:
    seq = sequence([1, 2, 3, 10, 11, 12, 9, 2, 3, 20, 21, 22], [1, 2, 3])
    draft = drafter().propose(seq, 3)
    assert draft is not None
    assert (draft.token_ids, draft.source) == ((10, 11, 12), "own")


def test_the_newest_of_equal_matches_wins() -> None:
    assert tokens_of(drafter().propose(sequence([5, 6, 7, 0, 5, 6, 8, 0, 5, 6]), 1)) == (8,)


def test_a_repetition_is_copied_from_the_copy() -> None:
    assert tokens_of(drafter().propose(sequence([9, 4, 4, 4]), 5)) == (4,) * 5
    assert tokens_of(drafter().propose(sequence([1, 2, 3, 1, 2, 3, 1, 2]), 7)) == (3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 9, 2]])
def test_nothing_is_proposed_where_two_tokens_never_occurred(tokens: list[int]) -> None:
    assert drafter().propose(sequence(tokens), MAX_DRAFT) is None


def test_no_more_than_asked_for() -> None:
    seq, drafts = sequence([*range(20), 0, 1]), drafter()
    assert drafts.propose(seq, 0) is None
    assert tokens_of(drafts.propose(seq, 2)) == (2, 3)
    assert tokens_of(drafts.propose(seq, 100)) == tuple(range(2, 2 + MAX_DRAFT))


def expected(tokens: list[int], most: int) -> tuple[int, ...]:
    """The longest match, found by trying every length and every place."""
    for length in range(min(8, len(tokens) - 1), 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                copied = list(tokens)
                for index in range(most):
                    copied.append(copied[place + index])
                return tuple(copied[len(tokens) :])
    return ()


@given(st.lists(st.integers(0, 3), max_size=17), st.integers(1, MAX_DRAFT))
def test_proposals_are_those_of_a_search_of_all_places(tokens: list[int], most: int) -> None:
    drafts, seq = drafter(), sequence(tokens[:1])
    for token in tokens[1:]:
        drafts.propose(seq, most)
        seq.token_ids.append(token)
    draft = drafts.propose(seq, most)
    found = tokens_of(draft)
    assert found == expected(tokens, most)[: len(found)], "a trial is shorter"
    assert bool(found) == bool(expected(tokens, most))


def test_a_quote_is_followed_where_its_words_are_frequent() -> None:
    """Newer places of the same two tokens than are looked at, and only the followed one goes on."""
    noise = [token for number in range(60) for token in (1000 + number, 1, 2, 2000 + number)]
    quote = [500, 501, 1, 2, 502, 1, 2, 503, 1, 2, 504]
    seq, drafts = sequence([*quote, *noise], [500, 501]), drafter()
    for token in quote[2:]:
        draft = drafts.propose(seq, 1)
        assert tokens_of(draft) == (token,)
        seq.token_ids.append(token)


def test_a_long_prompt_is_indexed_little_by_little() -> None:
    tokens = [*range(5000), 10, 11]
    late = sequence([*range(5000), 4900, 4901])
    drafts = drafter()
    assert tokens_of(drafts.propose(sequence(tokens), 2)) == (12, 13)
    assert drafts.propose(late, 2) is None
    for _ in range(20):
        found = drafts.propose(late, 2)
    assert tokens_of(found) == (4902, 4903)


def test_answers_of_the_namespace_are_proposed() -> None:
    drafts = drafter()
    finish(drafts, [90, 91], [1, 2, 3, 4, 5], digest=ONE)
    draft = drafts.propose(sequence([80], [2, 3], digest=ONE), 8)
    assert draft is not None
    assert (draft.token_ids, draft.source) == ((4, 5), "history")
    assert tokens_of(drafts.propose(sequence([70, 90, 91], digest=ONE), 2)) == (1, 2), "an answer's beginning"


@pytest.mark.parametrize("length", range(2, 10))
def test_a_short_sequence_that_several_answers_hold_whole_is_found(length: int) -> None:
    drafts, whole = drafter(), list(range(1, 1 + length))
    for number in range(3):
        finish(drafts, [90], [70, 71, *whole, 80 + number, 60])
    draft = drafts.propose(sequence(whole), 1)
    assert draft is not None
    assert draft.source == "history"
    assert draft.token_ids[0] in (80, 81, 82)


def test_the_longer_match_of_two_sources_is_proposed_at_first() -> None:
    drafts = drafter()
    finish(drafts, [0], [1, 2, 3, 4, 5, 60, 61])
    assert tokens_of(drafts.propose(sequence([4, 5, 70, 71], [2, 3, 4, 5]), 2)) == (60, 61)
    assert tokens_of(drafts.propose(sequence([2, 3, 4, 5, 70, 71], [4, 5, 6, 7, 4, 5, 70]), 1)) == (71,)


def test_the_source_that_was_right_is_preferred() -> None:
    drafts = drafter()
    finish(drafts, [0], [1, 2, 3, 60, 61])
    for _ in range(20):
        seq = sequence([1, 2, 3, 70, 71], [5, 1, 2, 3])
        draft = drafts.propose(seq, 2)
        assert draft is not None
        drafts.verified(seq, draft.source, 2, 2 if draft.source == "history" else 0)
    assert draft.source == "history"


def test_only_the_beginning_of_an_enormous_answer_is_kept() -> None:
    drafts = drafter()
    finish(drafts, [0], range(10, 20_000))
    assert tokens_of(drafts.propose(sequence([MAX_ANSWER, MAX_ANSWER + 1]), 4)) == (
        *range(MAX_ANSWER + 2, MAX_ANSWER + 6),
    )
    assert drafts.propose(sequence([MAX_ANSWER + 100, MAX_ANSWER + 101]), 4) is None


@pytest.mark.parametrize(("tenant", "digest"), [("umbrella", ONE), ("acme", OTHER), ("acme", None)])
def test_no_answer_of_another_tenant_or_version_is_proposed(tenant: str, digest: str | None) -> None:
    drafts = drafter()
    finish(drafts, [0], [1, 2, 3, 4], digest=ONE)
    assert drafts.propose(sequence([1, 2], tenant=tenant, digest=digest), 4) is None


Act = tuple[str, int, tuple[int, ...], int]
acts = st.lists(
    st.tuples(
        st.sampled_from(("finish", "grow", "close", "forget")),
        st.integers(0, 3),
        st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple),
        st.integers(0, MAX_DRAFT),
    ),
    max_size=40,
)
SPACES = (("acme", ONE), ("acme", OTHER), ("acme", None), ("umbrella", None))


def proposals(script: list[Act], only: int | None) -> list[Draft | None]:
    """What is proposed in namespace 0. `only`: nothing happens in any namespace but this one."""
    drafts, seen = drafter(), []
    running: dict[int, Sequence] = {}
    for kind, number, tokens, accepted in script:
        if only not in (None, number):
            continue
        tenant, digest = SPACES[number]
        if kind == "finish":
            finish(drafts, [7], tokens, tenant=tenant, digest=digest)
        elif kind == "close" and number in running:
            drafts.closed(running.pop(number))
        elif kind == "forget" and digest is not None:
            drafts.forget(digest)
        else:
            seq = running.setdefault(number, sequence([7], tenant=tenant, digest=digest))
            seq.token_ids += tokens
            draft = drafts.propose(seq, MAX_DRAFT)
            if number == 0:
                seen.append(draft)
            if draft is not None:
                right = min(accepted, len(draft.token_ids))
                drafts.verified(seq, draft.source, len(draft.token_ids), right)
    return seen


@given(acts)
def test_proposals_are_the_same_whatever_other_namespaces_do(script: list[Act]) -> None:
    assert proposals(script, None) == proposals(script, 0)


# What becomes of a sequence.


def test_nothing_of_a_closed_sequence_is_left() -> None:
    drafts, seq = drafter(), sequence([1, 2, 3, 1, 2])
    before = sys.getrefcount(seq)
    draft = drafts.propose(seq, 4)
    assert draft is not None
    drafts.verified(seq, draft.source, 4, 1)
    assert sys.getrefcount(seq) > before
    drafts.closed(seq)
    drafts.closed(seq)
    assert sys.getrefcount(seq) == before
    assert drafts.num_bytes == 0, "it was no proper end"
    drafts.verified(seq, draft.source, 4, 1)
    assert sys.getrefcount(seq) == before


def test_a_preemption_changes_nothing() -> None:
    one, other = drafter(), drafter()
    for token in (1, 2, 3, 1, 2, 3, 4, 1, 2):
        seqs = [sequence([1, 2, 3, 4, 1, 2], [token]) for _ in range(2)]
        one.propose(seqs[0], 4)
        other.propose(seqs[1], 4)
        seqs[1].epoch += 1
        seqs[1].num_computed = 0
        for seq in seqs:
            seq.token_ids += [token, 1, 2]
        assert one.propose(seqs[0], 4) == other.propose(seqs[1], 4)


def test_tokens_that_another_engine_generated_count_as_its_own() -> None:
    drafts = drafter()
    seq = sequence([0], [5, 6], generated=[5, 6, 7, 8])
    assert tokens_of(drafts.propose(seq, 2)) == (7, 8)
    drafts.finished(seq)
    assert tokens_of(drafts.propose(sequence([6, 7]), 2)) == (8, 5)


def test_a_version_that_is_dropped_is_forgotten() -> None:
    drafts = drafter()
    running = sequence([2, 3], digest=ONE)
    for digest in (ONE, OTHER):
        finish(drafts, [0], [1, 2, 3, 4, 5, 6], digest=digest)
    kept = drafts.num_bytes // 2
    assert drafts.propose(running, 2) is not None
    drafts.forget(ONE)
    assert drafts.num_bytes == kept
    assert drafts.propose(running, 2) is None
    assert drafts.propose(sequence([2, 3], digest=OTHER), 2) is not None
    drafts.forget(OTHER)
    assert drafts.num_bytes == 0


def test_what_is_drafted_and_accepted_is_counted_by_source() -> None:
    drafts, seq = drafter(), sequence([1, 2, 3, 1, 2])
    drafts.propose(seq, 4)
    drafts.verified(seq, "own", 4, 3)
    drafts.verified(seq, "history", 2, 0)
    assert drafts.num_drafted == {"own": 4, "history": 2}
    assert drafts.num_accepted == {"own": 3, "history": 0}


# What they promise.


def test_gains_never_rise_and_tell_what_was_accepted() -> None:
    drafts, seq = drafter(), sequence([*range(10), 0, 1])
    for _ in range(100):
        draft = drafts.propose(seq, 4)
        assert draft is not None
        assert [*draft.gains] == sorted(draft.gains, reverse=True)
        assert 0 <= draft.gains[-1] <= draft.gains[0] <= 1
        drafts.verified(seq, draft.source, 4, 2)
    assert draft.gains == pytest.approx((1, 0.5, 0.25, 0.125), abs=0.1)


def test_a_right_draft_promises_ever_more_and_a_wrong_one_less() -> None:
    for accepted, bound in ((4, 0.9), (0, 0.05)):
        drafts, seq = drafter(), sequence([*range(10), 0, 1])
        for _ in range(30):
            draft = drafts.propose(seq, 4)
            assert draft is not None
            drafts.verified(seq, draft.source, 4, accepted)
        draft = drafts.propose(seq, 4)
        assert draft is not None
        assert (draft.gains[0] > bound) == (accepted > 0)


@pytest.mark.parametrize("least", [0.02, 0.2, 0.5])
def test_nonsense_is_soon_left_out(least: float) -> None:
    """The rows of a tenant that is always wrong, of 4,000 that could be taken each time."""
    seq, drafts = sequence([1, 2, 1, 2]), drafter()
    assert is_nonsense(drafts, seq, 4_000, least) <= 160
    assert is_nonsense(drafts, seq, 4_000, least) <= 16


def test_what_was_nonsense_once_recovers() -> None:
    seq, drafts = sequence([1, 2, 1, 2]), drafter()
    is_nonsense(drafts, seq, 1_000, 0.1)
    promised = 0.0
    for _ in range(1_000):
        seq.token_ids.append(seq.token_ids[-2])
        draft = drafts.propose(seq, 4)
        assert draft is not None
        promised = draft.gains[0]
        if promised >= 0.2:
            drafts.verified(seq, draft.source, len(draft.token_ids), len(draft.token_ids))
    assert promised > 0.9


def test_another_namespace_learns_by_itself() -> None:
    drafts = drafter()
    is_nonsense(drafts, sequence([1, 2, 1, 2]), 100, 0.02)
    fresh, other = drafter(), sequence([1, 2, 1, 2], digest=ONE)
    assert drafts.propose(other, 4) == fresh.propose(other, 4)


def test_what_was_learned_of_a_version_is_dropped_with_it() -> None:
    drafts, seq = drafter(), sequence([1, 2, 1, 2], digest=ONE)
    is_nonsense(drafts, seq, 100, 0.02)
    poor = drafts.propose(seq, 4)
    drafts.forget(ONE)
    fresh = drafts.propose(seq, 4)
    assert poor is not None
    assert fresh is not None
    assert poor.gains[0] < 0.1 < fresh.gains[0]


def test_what_is_learned_of_too_many_namespaces_is_dropped() -> None:
    drafts = drafter()
    seq = sequence([1, 2, 1, 2])
    is_nonsense(drafts, seq, 100, 0.02)
    poor = drafts.propose(seq, 4)
    for number in range(MAX_LEARNED):
        drafts.propose(sequence([1, 2, 1, 2], digest=f"{number:064x}"), 4)
    fresh = drafts.propose(seq, 4)
    assert poor is not None
    assert fresh is not None
    assert poor.gains[0] < 0.1 < fresh.gains[0]
