"""What a `model` stands for: own names in every spelling, nobody else's in any."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.control.db.tables import AdapterVersion
from loraplex.control.errors import ControlError, ModelNotAllowed, ModelNotFound
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.types import Principal, Serving
from support.control.plane import SERVED_NAME, ControlPlane, caller

ACME = caller("acme")


@pytest.fixture
def served(plane: ControlPlane) -> ControlPlane:
    """acme: `pirate` v1 (released) and v2, `json`; rival: `secret`, and `pirate` of its own."""
    plane.add("acme", "pirate", 1)
    plane.add("acme", "pirate", 2)
    plane.add("acme", "json", 3)
    plane.add("rival", "secret", 4)
    plane.add("rival", "pirate", 5)
    return plane


async def version_of(plane: ControlPlane, model: str, who: Principal = ACME, **options: Any) -> str | None:
    adapter = (await plane.resolver.resolve(who, model, **options)).adapter
    if adapter is None:
        return None
    assert adapter.tenant_id == who.tenant_id
    info = plane.catalog.get_version(adapter.tenant_id, adapter.name, f"v{adapter.version}")
    assert adapter == info.ref()
    return f"{adapter.name}@v{adapter.version}"


async def refusal(plane: ControlPlane, model: str, who: Principal = ACME) -> ControlError:
    with pytest.raises(ControlError) as caught:
        await plane.resolver.resolve(who, model)
    return caught.value


async def test_every_spelling_of_what_is_there(served: ControlPlane) -> None:
    digest = served.catalog.get_version("acme", "pirate", "v2").digest
    assert await version_of(served, SERVED_NAME) is None
    for base in ("", f"{SERVED_NAME}:"):
        assert await version_of(served, f"{base}pirate") == "pirate@v1"
        assert await version_of(served, f"{base}pirate@v2") == "pirate@v2"
        assert await version_of(served, f"{base}pirate@sha256:{digest[:12]}") == "pirate@v2"
        assert await version_of(served, f"{base}pirate@sha256:{digest}") == "pirate@v2"
    rival = caller("rival")
    assert await version_of(served, "pirate", rival) == "pirate@v1"
    assert (await served.resolver.resolve(rival, "pirate")).adapter != (
        await served.resolver.resolve(ACME, "pirate")
    ).adapter


async def test_everything_else_is_answered_as_if_it_did_not_exist(served: ControlPlane) -> None:
    digest = served.catalog.get_version("acme", "pirate", "v2").digest
    foreign = served.catalog.get_version("rival", "secret", "v1").digest
    models = [
        "secret", "secret@v1", f"secret@sha256:{foreign[:12]}", f"pirate@sha256:{foreign[:12]}", "rival/secret",
        "unknown", "", ":", "@", "@v1", "pirate@", "pirate@v0", "pirate@v3", "pirate@v01", "pirate@v", "pirate@v1@v1",
        "pirate@1", "pirate@latest", "pirate@v" + "9" * 400, "pirate@v²", f"pirate@{digest[:12]}",
        f"pirate@sha256:{digest[:11]}", f"pirate@sha256:{digest}0", f"pirate@sha256:{digest[:12].upper()}x",
        "pirate@sha256:", "pirate@sha256:%%%%%%%%%%%%", "PIRATE", " pirate", "pirate ", "other:pirate",
        f"{SERVED_NAME}:", f"{SERVED_NAME}:{SERVED_NAME}", f"{SERVED_NAME}:{SERVED_NAME}:pirate", f"{SERVED_NAME}@v1",
        "sha256:pirate", "pirate:json", "\x00", "\ud800", "x" * 100_000, "../pirate",
    ]  # fmt: skip
    for model in models:
        error = await refusal(served, model)
        assert isinstance(error, ModelNotFound)
        assert error.code == "model_not_found"
        shown = model[:200]
        assert error.message == f"The model '{shown}' does not exist or you do not have access to it."


async def test_an_unknown_name_costs_no_more_than_a_foreign_one(
    served: ControlPlane, statements: list[str]
) -> None:
    """Both are looked for among the caller's own, once; what can be no name is not looked for at all."""
    asked = []
    for model in ("secret", "unknown"):
        for _ in range(2):
            statements.clear()
            assert isinstance(await refusal(served, model), ModelNotFound)
            asked.append(tuple(statements))
    assert asked == [asked[0], (), asked[0], ()]
    assert len(asked[0]) == 1
    statements.clear()
    for model in ("", "No Name", "x" * 64, f"{SERVED_NAME}:{SERVED_NAME}:pirate"):
        assert isinstance(await refusal(served, model), ModelNotFound)
    assert statements == []


async def test_only_changes_of_a_name_are_read_again(served: ControlPlane, statements: list[str]) -> None:
    async def read_again() -> set[str]:
        found = set()
        for model in ("pirate", "json"):
            statements.clear()
            with contextlib.suppress(ModelNotFound):
                await served.resolver.resolve(ACME, model)
            found |= {model} if statements else set()
        statements.clear()
        await served.resolver.list_models(ACME)
        return found | ({"list"} if statements else set())

    await read_again()
    assert await read_again() == set()
    served.add("rival", "pirate", 6)
    served.tenants.update("acme", {"weight": 2.0})
    assert await read_again() == set()
    changes: list[Callable[[], object]] = [
        lambda: served.add("acme", "pirate", 7),
        lambda: served.releases.promote("acme", "pirate", "v2"),
        lambda: served.releases.put("acme", "pirate", [ReleaseTarget("v1", 1)]),
        lambda: served.releases.rollback("acme", "pirate"),
        lambda: served.catalog.delete_version("acme", "pirate", "v3"),
        lambda: served.catalog.delete_adapter("acme", "pirate"),
    ]
    for change in changes:
        change()
        assert await read_again() == {"pirate", "list"}
    assert isinstance(await refusal(served, "pirate"), ModelNotFound)


async def test_a_key_for_some_models_may_use_those(served: ControlPlane) -> None:
    key = caller("acme", models=frozenset({"json", "pirate@v2"}))
    assert await version_of(served, "json", key) == "json@v1"
    assert await version_of(served, f"{SERVED_NAME}:json@v1", key) == "json@v1"
    assert await version_of(served, "pirate@v2", key) == "pirate@v2"
    for model in ("pirate", "pirate@v1", SERVED_NAME):
        assert isinstance(await refusal(served, model, key), ModelNotAllowed)
    for model in ("secret", "unknown", "pirate@v9"):
        assert isinstance(await refusal(served, model, key), ModelNotFound)
    assert [card.id for card in await served.resolver.list_models(key)] == ["json"]
    foreign = caller("acme", models=frozenset({"secret"}))
    assert isinstance(await refusal(served, "secret", foreign), ModelNotFound)
    assert await served.resolver.list_models(foreign) == []


async def test_models_are_listed_with_what_they_are(served: ControlPlane) -> None:
    cards = await served.resolver.list_models(ACME)
    assert [(card.id, card.parent) for card in cards] == [
        (SERVED_NAME, None),
        ("json", SERVED_NAME),
        ("pirate", SERVED_NAME),
    ]
    assert cards[0].root == SERVED_NAME
    released = served.catalog.get_version("acme", "pirate", "v1")
    assert (cards[2].root, cards[2].created) == (released.digest, int(released.created_at.timestamp()))
    admin = Principal(None, None, frozenset(), is_admin=True)
    assert [card.id for card in await served.resolver.list_models(admin)] == [SERVED_NAME]
    assert isinstance(await refusal(served, "pirate", admin), ModelNotFound)


async def test_traffic_is_shared_by_weight(served: ControlPlane) -> None:
    targets = [ReleaseTarget("v1", 3), ReleaseTarget("v2", 1)]
    served.releases.put("acme", "pirate", targets)
    drawn = Counter([await version_of(served, "pirate") for _ in range(400)])
    assert 220 < drawn["pirate@v1"] < 370
    assert drawn.total() == drawn["pirate@v1"] + drawn["pirate@v2"]
    served.releases.put("acme", "pirate", [ReleaseTarget("v1", 0), ReleaseTarget("v2", 1)])
    assert {await version_of(served, "pirate") for _ in range(50)} == {"pirate@v2"}


async def test_a_sticky_release_keeps_everyone_on_one_version(served: ControlPlane) -> None:
    targets = [ReleaseTarget("v1", 1), ReleaseTarget("v2", 1)]
    served.releases.put("acme", "pirate", targets, sticky="user")
    users = {f"u{i}": await version_of(served, "pirate", user=f"u{i}") for i in range(100)}
    assert 25 < Counter(users.values())["pirate@v1"] < 75
    again = ControlPlane(served.root)
    for user, version in users.items():
        assert await version_of(again, "pirate", caller("acme", key_id="another"), user=user) == version
    again.close()

    served.releases.put("acme", "pirate", targets, sticky="key")
    keys = {i: await version_of(served, "pirate", caller("acme", key_id=f"k{i}")) for i in range(100)}
    assert 25 < Counter(keys.values())["pirate@v1"] < 75
    for i, version in keys.items():
        assert await version_of(served, "pirate", caller("acme", key_id=f"k{i}"), user=f"u{i}") == version


async def test_a_larger_share_takes_users_over_and_gives_none_back(served: ControlPlane) -> None:
    async def on_v2(share: int) -> set[int]:
        targets = [ReleaseTarget("v1", 100 - share), ReleaseTarget("v2", share)]
        served.releases.put("acme", "pirate", targets, sticky="user")
        return {i for i in range(100) if await version_of(served, "pirate", user=f"u{i}") == "pirate@v2"}

    before: set[int] = set()
    for share in (10, 30, 60, 90):
        now = await on_v2(share)
        assert before < now
        before = now


async def test_changes_are_seen_at_once_here_and_soon_in_other_processes(served: ControlPlane) -> None:
    other = ControlPlane(served.root, clock=served.clock)
    assert await version_of(other, "pirate") == "pirate@v1"
    served.releases.promote("acme", "pirate", "v2")
    assert await version_of(served, "pirate") == "pirate@v2"
    assert await version_of(other, "pirate") == "pirate@v1"
    served.clock.advance(2.0)
    assert await version_of(other, "pirate") == "pirate@v2"
    served.catalog.delete_adapter("acme", "pirate")
    assert isinstance(await refusal(served, "pirate"), ModelNotFound)
    assert isinstance(await refusal(served, "pirate@v1"), ModelNotFound)
    other.close()


async def test_many_adapters_take_as_many_queries_as_one(served: ControlPlane, statements: list[str]) -> None:
    await served.resolver.resolve(ACME, "pirate")
    of_few = len(statements)
    for number in range(20):
        served.add("rival", f"a{number}", 9)
    statements.clear()
    await served.resolver.resolve(caller("rival"), "a7")
    assert 0 < len(statements) <= of_few


async def test_a_version_is_resolved_with_its_formats(plane: ControlPlane) -> None:
    """The same bytes with other formats are another version."""
    made = [
        plane.upload("acme", "pirate", serving=serving)
        for serving in (Serving("hermes", None), Serving(), Serving("hermes", None), Serving("json", "none"))
    ]
    assert [(info.version, info.serving.tool_format, is_new) for info, is_new in made] == [
        ("v1", "hermes", True), ("v2", None, True), ("v1", "hermes", False), ("v3", "json", True),
    ]  # fmt: skip
    assert len({info.digest for info, _ in made}) == 1
    for model, formats in (
        ("pirate", ("hermes", None)),
        ("pirate@v2", (None, None)),
        ("pirate@v3", ("json", "none")),
    ):
        serving = (await plane.resolver.resolve(ACME, model)).serving
        assert (serving.tool_format, serving.reasoning_format) == formats
    (_, card) = await plane.resolver.list_models(ACME)
    assert card.serving == Serving("hermes", None)


async def test_a_version_is_resolved_with_its_head_and_its_vectors(plane: ControlPlane) -> None:
    head = Head("token_classify", ("O", "PER"), "single_label_classification")
    vectors = EmbeddingSpec("last", normalize=True, dimensions=64)
    for name in ("pirate", "json"):
        plane.upload("acme", name)
    with plane.database.write() as session:
        row = session.get_one(AdapterVersion, ("acme", "pirate", 1))
        row.head, row.embedding = head.as_json(), vectors.as_json()
    info = plane.catalog.get_version("acme", "pirate", "v1")
    for found in (info, await plane.resolver.resolve(ACME, "pirate")):
        assert (found.head, found.embedding) == (head, vectors)
    plain = await plane.resolver.resolve(ACME, "json")
    assert (plain.head, plain.embedding) == (None, None)
