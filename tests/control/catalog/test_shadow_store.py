"""Sums and texts of shadow versions: added up, bounded, and gone with their adapter."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from loraplex.control.catalog.release_changes import MAX_REVISIONS
from loraplex.control.catalog.shadow_store import (
    MOST_TEXTS,
    TEXT_BYTES,
    TEXTS_KEPT,
    ShadowKey,
    ShadowStore,
    ShadowSums,
    began_of,
)
from loraplex.control.db.database import utc_now
from loraplex.control.db.release_tables import ShadowText
from loraplex.control.release_types import ReleaseInfo, ShadowInfo
from support.control.plane import ControlPlane

KEY = ShadowKey("acme", "pirate", 3, 2)


@pytest.fixture
def store(plane: ControlPlane) -> ShadowStore:
    """Of a plane that has `pirate` with v1 and v2."""
    for seed in (1, 2):
        plane.add("acme", "pirate", seed)
    return ShadowStore(plane.database)


def sums(**values: float) -> ShadowSums:
    made = ShadowSums()
    made.add(values)
    return made


def texts(*prompts: str) -> ShadowSums:
    made = ShadowSums()
    for prompt in prompts:
        made.add_texts(prompt, "yes", "no")
    return made


def test_batches_add_up_by_release_and_version(store: ShadowStore) -> None:
    assert store.read("acme", "pirate", 3) is None
    store.add({KEY: sums(samples=2, exact=1, diverged_at=4, live_tokens=9, live_logprob=-1.5)})
    store.add({KEY: sums(samples=1, exact=1, shadow_tokens=3, live_logprob=-0.5, scored=7)})
    store.add({KEY: sums(dropped=5, failed=1)})
    store.add({ShadowKey("acme", "pirate", 4, 2): sums(samples=100)})
    assert store.read("acme", "pirate", 3) == ShadowInfo(
        "v2",
        3,
        samples=3,
        dropped=5,
        failed=1,
        exact=2,
        diverged_at=4,
        live_tokens=9,
        shadow_tokens=3,
        scored=7,
        live_logprob=-2.0,
    )
    assert store.read("rival", "pirate", 3) is None


def test_the_newest_texts_are_kept(store: ShadowStore) -> None:
    for first in range(0, MOST_TEXTS + 20, 20):
        store.add({KEY: texts(*(f"prompt {number}" for number in range(first, first + 20)))})
    kept = store.texts("acme", "pirate", 3)
    assert len(kept) == MOST_TEXTS
    assert kept[0].prompt == f"prompt {MOST_TEXTS + 19}"
    assert {text.prompt for text in kept} == {f"prompt {number}" for number in range(20, MOST_TEXTS + 20)}
    assert (kept[0].version, kept[0].answer, kept[0].shadow_answer) == ("v2", "yes", "no")
    assert store.texts("acme", "pirate", 4) == store.texts("rival", "pirate", 3) == []


def test_releases_put_again_and_again_leave_no_more_than_one_does(
    store: ShadowStore, plane: ControlPlane
) -> None:
    for began in range(3, 8):
        store.add({ShadowKey("acme", "pirate", began, 2): texts(*map(str, range(MOST_TEXTS // 4)))})
    assert count_texts(plane) == MOST_TEXTS
    assert store.texts("acme", "pirate", 3) == []
    assert len(store.texts("acme", "pirate", 7)) == MOST_TEXTS // 4
    store.add({ShadowKey("acme", "pirate", 4 + MAX_REVISIONS, 2): sums(samples=1)})
    found = [store.read("acme", "pirate", began) is not None for began in range(3, 8)]
    assert found == [False, False, True, True, True], "those that history still has"


def test_a_long_text_is_cut_at_a_whole_character(store: ShadowStore) -> None:
    store.add({KEY: texts("a" + "é" * TEXT_BYTES, "nul \0 and \ud800 alone")})
    nul, long = sorted(text.prompt for text in store.texts("acme", "pirate", 3))[::-1]
    assert long == "a" + "é" * ((TEXT_BYTES - 1) // 2)
    assert nul == "nul \N{REPLACEMENT CHARACTER} and ? alone"


def test_old_texts_are_not_shown_and_are_removed(store: ShadowStore, plane: ControlPlane) -> None:
    store.add({KEY: texts("old")})
    with plane.database.write() as session:
        session.execute(update(ShadowText).values(at=utc_now() - TEXTS_KEPT - timedelta(seconds=1)))
    store.add({ShadowKey("acme", "other", 1, 1): texts("of no adapter")})
    assert store.texts("acme", "pirate", 3) == []
    assert count_texts(plane) == 1
    assert (store.remove_old_texts(), count_texts(plane)) == (1, 0)


def test_all_goes_with_the_adapter_and_nothing_comes_later(store: ShadowStore, plane: ControlPlane) -> None:
    store.add({KEY: texts("secret")})
    store.add({KEY: sums(samples=1)})
    plane.catalog.delete_adapter("acme", "pirate")
    store.add({KEY: texts("late")})
    assert store.read("acme", "pirate", 3) is None
    assert count_texts(plane) == 0


def test_all_goes_with_the_last_version(store: ShadowStore, plane: ControlPlane) -> None:
    store.add({KEY: texts("secret")})
    plane.catalog.delete_version("acme", "pirate", "v2")
    assert count_texts(plane) == 1
    plane.catalog.delete_version("acme", "pirate", "v1")
    assert count_texts(plane) == 0


def test_the_steps_of_a_schedule_are_summed_up_as_one() -> None:
    assert began_of(ReleaseInfo("acme", "pirate", 7, (), "none", utc_now())) == 7
    assert began_of(ReleaseInfo("acme", "pirate", 7, (), "none", utc_now(), began=4)) == 4


def count_texts(plane: ControlPlane) -> int:
    with plane.database.read() as session:
        return session.scalar(select(func.count()).select_from(ShadowText)) or 0
