"""The OpenAPI document accepts and refuses what the server does, where more than a type decides."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loraplex.admin.schemas import described
from loraplex.control import rules
from loraplex.control.errors import ControlError
from support.http.admin_plane import AdminPlane

BODIES: list[tuple[str, str, Any, bool]] = [
    ("POST", "/tenants", {"id": "acme-2"}, True),
    ("POST", "/tenants", {"id": "Acme"}, False),
    ("POST", "/tenants", {"id": "-acme"}, False),
    ("POST", "/tenants", {"id": "a" * 63}, True),
    ("POST", "/tenants", {"id": "a" * 64}, False),
    ("POST", "/tenants", {"id": "a", "weight": 0.001}, True),
    ("POST", "/tenants", {"id": "a", "weight": 0.0009}, False),
    ("POST", "/tenants", {"id": "a", "weight": 1000.5}, False),
    ("POST", "/tenants", {"id": "a", "display_name": "株式会社\u3000例 \U0001f469\u200d\U0001f680"}, True),
    ("POST", "/tenants", {"id": "a", "display_name": "a\u202eb"}, False),
    ("POST", "/tenants", {"id": "a", "display_name": "a\x7f"}, False),
    ("POST", "/tenants", {"id": "a", "limits": {"budget_period": "day"}}, False),
    ("POST", "/tenants", {"id": "a", "limits": {"token_budget": 5}}, False),
    ("POST", "/tenants", {"id": "a", "limits": {"token_budget": 5, "budget_period": None}}, False),
    ("POST", "/tenants", {"id": "a", "limits": {"token_budget": 5, "budget_period": "day"}}, True),
    ("POST", "/tenants", {"id": "a", "limits": {"token_budget": None, "budget_period": None}}, True),
    ("POST", "/tenants/acme/keys", {"limits": {"token_budget": 5}}, False),
    ("POST", "/tenants/acme/keys", {"limits": {"max_adapters": 5}}, False),
    ("POST", "/tenants/acme/keys", {"limits": {"max_adapters": None}}, True),
    ("POST", "/tenants/acme/keys", {"models": []}, False),
    ("POST", "/tenants/acme/keys", {"models": ["support"]}, True),
    ("PUT", "/tenants/acme/adapters/support/release", {"targets": [{"version": "v1", "weight": 0}]}, False),
    ("PUT", "/tenants/acme/adapters/support/release", {"targets": [{"version": "v1", "weight": 1}]}, True),
    (
        "PUT",
        "/tenants/acme/adapters/support/release",
        {"targets": [{"version": f"v{number}", "weight": 1} for number in range(1, 18)]},
        False,
    ),
]


PLANS: list[tuple[Any, bool]] = [
    ({"guard": None, "schedule": None, "shadow": None}, True),
    ({"guard": {}}, True),
    ({"guard": {"max_false_alarm": 0.1, "min_requests": 0}}, True),
    ({"guard": {"max_false_alarm": 0}}, False),
    ({"guard": {"max_false_alarm": 0.11}}, False),
    ({"guard": {"min_requests": 0.5}}, False),
    ({"guard": {"speed": 1}}, False),
    ({"guard": []}, False),
    ({"guard": {"metrics": []}}, False),
    ({"guard": {"metrics": [{"name": "ttft", "margin": 10}, {"name": "itl"}]}}, True),
    ({"guard": {"metrics": [{"name": "ttft"}, {"name": "ttft", "margin": 1}]}}, False),
    ({"guard": {"metrics": [{"name": "error_rate", "margin": 0.5}]}}, True),
    ({"guard": {"metrics": [{"name": "error_rate", "margin": 0.6}]}}, False),
    ({"guard": {"metrics": [{"name": "ttft", "margin": None}]}}, False),
    ({"schedule": [{"weight": 99, "for_seconds": 1}]}, True),
    ({"schedule": [{"weight": 100, "for_seconds": 1}]}, False),
    ({"schedule": [{"weight": 1, "for_seconds": 0}]}, False),
    ({"schedule": [{"weight": 1}]}, False),
    ({"schedule": []}, False),
    ({"schedule": [[{"weight": 1, "for_seconds": 1}]]}, False),
    ({"schedule": [{"weight": n, "for_seconds": 1} for n in range(1, 22)]}, False),
    ({"shadow": {"version": "v3", "sample": 1}}, True),
    ({"shadow": {"version": "v3", "sample": 0}}, False),
    ({"shadow": {"version": "3", "sample": 0.5}}, False),
    ({"shadow": {"version": "v3", "sample": 0.5, "keep_texts": 1}}, False),
]


@pytest.mark.parametrize(("method", "path", "body", "valid"), BODIES)
async def test_bodies(
    plane: AdminPlane, admin: httpx.AsyncClient, method: str, path: str, body: Any, valid: bool
) -> None:
    plane.make_tenant()
    plane.make_adapter("support")
    said = (await body_schema(admin, method, path)).is_valid(body)
    answer = await admin.request(method, path, json=body)
    assert (said, answer.status_code < 300) == (valid, valid), answer.text


async def test_plans_of_a_release(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    plane.make_tenant()
    for seed in (1, 2, 3):
        plane.make_adapter("support", seed=seed)
    path = "/tenants/acme/adapters/support/release"
    targets = {"targets": [{"version": "v1", "weight": 1}, {"version": "v2", "weight": 1}]}
    schema = await body_schema(admin, "PUT", path)
    for plan, valid in PLANS:
        answer = await admin.put(path, json=targets | plan)
        assert (schema.is_valid(targets | plan), answer.status_code < 300) == (valid, valid), (
            plan,
            answer.text,
        )
        await admin.post(f"{path}/promote", json={"version": "v1"})  # ends what runs


async def body_schema(admin: httpx.AsyncClient, method: str, path: str) -> Any:
    """A validator of a route's body, by the document."""
    document = (await admin.get(str(admin.base_url.copy_with(path="/openapi.json")))).json()
    template = f"/admin/v1{path}".replace("/acme", "/{tenant}").replace("/support", "/{name}")
    body = document["paths"][template][method.lower()]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    return jsonschema_rs.validator_for(schema | {"components": document["components"]})


@pytest.mark.parametrize(
    ("group_by", "valid"), [("tenant", True), ("version,tenant", True), ("", False), ("tenant,tenant", False)]
)
async def test_groups_of_usage(admin: httpx.AsyncClient, group_by: str, valid: bool) -> None:
    assert jsonschema_rs.validator_for(described.GROUP_BY).is_valid(group_by.split(",")) == valid
    answer = await admin.get("/usage", params={"group_by": group_by})
    assert (answer.status_code == 200) == valid


def passes(check: Any, value: str) -> bool:
    try:
        check(value)
    except ControlError:
        return False
    return True


@given(value=st.text(max_size=70) | st.text("aZ0.-_", max_size=70))
@example(value="a" * 63)
@example(value="a" * 64)
@example(value="a\n")
@example(value="é")
def test_patterns_are_what_is_checked(value: str) -> None:
    for pattern, check in (
        (described.TENANT_ID, rules.check_tenant_id),
        (described.ADAPTER_NAME, rules.check_adapter_name),
        (described.PLAIN_TEXT, lambda text: rules.check_text(text, "x")),
    ):
        assert (re.fullmatch(pattern, value) is not None) == passes(check, value)
