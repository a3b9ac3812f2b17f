"""What nobody in their right mind sends: names, secrets, numbers and secret files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.control.errors import InvalidKey, InvalidValue, ModelNotAllowed, ModelNotFound, SecretUnusable
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.secrets import load_or_create, load_pepper
from support.control.plane import ADMIN_TOKEN, PEPPER, SERVED_NAME, ControlPlane, caller


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    for tenant, name, seed in (("acme", "pirate", 1), ("rival", "secret", 2)):
        plane.tenants.create(tenant)
        plane.add(tenant, name, seed)
    yield plane
    plane.close()


_PARTS = st.sampled_from(
    [
        "pirate",
        "secret",
        SERVED_NAME,
        "@",
        ":",
        "v",
        "1",
        "v1",
        "0",
        "-",
        "sha256",
        "sha256:",
        "a" * 12,
        "²",
        "\ud800",
    ]
)
_MODELS = st.text() | st.lists(_PARTS | st.text(max_size=2), max_size=7).map("".join)
_ALLOWED = st.none() | st.frozensets(
    st.sampled_from(["pirate", "pirate@v1", "secret", SERVED_NAME]), min_size=1
)


@given(_MODELS, _ALLOWED, st.none() | st.text(max_size=4))
def test_any_model_is_an_own_one_or_refused(
    served: ControlPlane, model: str, allowed: frozenset[str] | None, user: str | None
) -> None:
    who = caller("acme", models=allowed)
    try:
        found = asyncio.run(served.resolver.resolve(who, model, user=user))
    except (ModelNotFound, ModelNotAllowed):
        return
    if found.adapter is None:
        assert model == SERVED_NAME
    else:
        assert (found.adapter.tenant_id, found.adapter.name) == ("acme", "pirate")
        assert model.removeprefix(f"{SERVED_NAME}:").startswith("pirate")
        assert allowed is None or allowed & {"pirate", "pirate@v1"}


@given(
    st.text() | st.text(max_size=20).map("lpx_".__add__) | st.text(max_size=9).map(f"lpx_{'0' * 16}_".__add__)
)
def test_any_secret_that_is_none_is_refused_in_the_same_words(served: ControlPlane, secret: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        asyncio.run(served.key_cache().authenticate(secret))
    assert caught.value.message == "Incorrect API key provided, or it has expired or was revoked."


def test_malformed_key_costs_no_memory_and_no_query(plane: ControlPlane, statements: list[str]) -> None:
    cache = plane.key_cache()
    for secret in (
        "",
        "sk-abc",
        "lpx",
        "lpx_",
        "lpx__x",
        "lpx_A_x",
        "lpx_" + "a" * 33 + "_x",
        "lpx_\x00_x",
        "\ud800",
    ):
        with pytest.raises(InvalidKey):
            asyncio.run(cache.authenticate(secret))
    assert not cache._known
    assert statements == []


def test_an_empty_admin_token_makes_nobody_the_admin(plane: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(SecretUnusable):
        KeyCache(plane.database, PEPPER, "")
    path = tmp_path / "admin-token"
    for empty in ("", "\n", "  \n"):
        path.write_text(empty)
        with pytest.raises(SecretUnusable) as caught:
            load_or_create(path, ADMIN_TOKEN)
        assert str(path) in caught.value.message
        assert path.read_text() == empty


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab" * 31, "ab" * 33, "é"])
def test_a_damaged_pepper_is_neither_used_nor_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key-pepper"
    path.write_text(text)
    with pytest.raises(SecretUnusable) as caught:
        load_pepper(tmp_path)
    assert str(path) in caught.value.message
    assert "zz" not in caught.value.message
    assert path.read_text() == text


@pytest.mark.parametrize("weight", [True, 10**400, -(10**400), float("nan"), float("-inf"), 0.0009, 1000.1])
def test_weights_that_are_none(plane: ControlPlane, weight: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        plane.tenants.update("acme", {"weight": weight})
    assert caught.value.param == "weight"
    assert plane.tenants.get("acme").weight == 1.0
