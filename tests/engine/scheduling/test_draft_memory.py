"""The cost of guessed tokens: the work of a call, and the memory of finished answers."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from loraplex.engine.scheduling.drafting import Drafter
from support.drafts import ONE, OTHER, drafter, finish, sequence, tokens_of
from support.work import lines_run

HOSTILE = {
    "equal": [7] * 60_000,
    "distinct": [*range(60_000)],
    "two": [7, 8] * 30_000,
    "nearly": [token for number in range(10_000) for token in (1, 2, 3, 4, 5, number)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_work_of_a_call_is_bounded(name: str) -> None:
    tokens = HOSTILE[name]
    drafts = drafter(1 << 20, 1 << 20)
    for start in range(0, 60_000, 6_000):
        finish(drafts, [0], tokens[start : start + 6_000])
    assert lines_run(lambda: finish(drafts, [0], tokens)) < 60_000
    seq = sequence(tokens)
    indexing = [lines_run(lambda: drafts.propose(seq, 8)) for _ in range(200)]
    assert max(indexing) < 3_000
    for token in (7, 7, 8, 1, 2, 3, 4, 5):
        seq.token_ids.append(token)
        assert lines_run(lambda: drafts.propose(seq, 8)) < 600


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tenant_stays_within_its_bytes_and_leaves_others_theirs(name: str) -> None:
    tokens, cap = HOSTILE[name], 100_000
    drafts = drafter(cap, 3 * cap)
    finish(drafts, [0], [1, 2, 3], tenant="small")
    kept = drafts.num_bytes
    for number in range(120):
        finish(drafts, [0], tokens[number * 300 :][:2_000], tenant="hog", digest=f"{number % 7:064x}")
        assert drafts.num_bytes - kept <= cap
    assert tokens_of(drafts.propose(sequence([1, 2], tenant="small"), 1)) == (3,)


@pytest.mark.parametrize(("bytes_per_tenant", "other"), [(20_000, "acme"), (1 << 20, "umbrella")])
def test_the_answer_used_longest_ago_is_dropped_first(bytes_per_tenant: int, other: str) -> None:
    drafts = drafter(bytes_per_tenant, 20_000)
    finish(drafts, [0], [1, 2, 3, 4])
    finish(drafts, [0], [5, 6, 7, 8])
    for number in range(100):
        user = sequence([1, 2])
        draft = drafts.propose(user, 1)
        assert tokens_of(draft) == (3,)
        drafts.verified(user, "history", 1, 1)
        drafts.closed(user)
        finish(drafts, [0], range(100 * number, 100 * number + 50), tenant=other, digest=ONE)
    assert drafts.propose(sequence([5, 6]), 1) is None


def test_a_dropped_answer_is_not_followed() -> None:
    drafts, running = drafter(20_000, 20_000), sequence([1, 2])
    finish(drafts, [0], [1, 2, 3, 4, 5])
    assert tokens_of(drafts.propose(running, 1)) == (3,)
    for number in range(100):
        finish(drafts, [0], range(100 * number + 50, 100 * number + 99))
    running.token_ids.append(3)
    assert drafts.propose(running, 1) is None


def test_an_answer_above_the_bytes_of_a_tenant_is_not_kept() -> None:
    drafts = drafter(1_000, 1 << 20)
    finish(drafts, [0], range(1_000))
    assert drafts.num_bytes == 0


def fill(drafts: Drafter, answers: range, num_tenants: int) -> None:
    """Answers of 4 to 23 tokens that repeat each other in part, of tenants with three namespaces each."""
    for number in answers:
        body = [(number * 31 + place * (1 + number % 3)) % 5_000 for place in range(4 + number % 20)]
        digest = (None, ONE, OTHER)[number // num_tenants % 3]
        finish(drafts, [1, 2, 3], body, tenant=f"t{number % num_tenants}", digest=digest)


@pytest.mark.parametrize(
    ("num_answers", "num_tenants", "total"),
    [
        (500, 1, 100_000),
        (500, 20, 200_000),
        pytest.param(100_000, 400, 2_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
)
def test_real_memory_stays_within_the_cap(num_answers: int, num_tenants: int, total: int) -> None:
    drafts = drafter(total // 2 if num_tenants == 1 else 100_000, total)
    cap = total // 2 if num_tenants == 1 else total
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, num_answers, num_answers // 10):
            fill(drafts, range(start, start + num_answers // 10), num_tenants)
            assert tracemalloc.get_traced_memory()[0] - before <= cap
            assert drafts.num_bytes <= cap
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert drafts.num_bytes > 0.9 * cap, "it is filled"
    assert real > 0.5 * cap, "no byte is counted twice"
