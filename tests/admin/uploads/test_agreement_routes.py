"""The agreement report over HTTP: its answer, its caps, and whom it is charged to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.admin.schemas.series import MAX_SEQUENCES, MAX_TOKENS
from loraplex.control.audit.log import AuditFilter
from loraplex.control.catalog.series import SeriesRules
from support.adapters.drafts import peft_config
from support.engine.fake_engine import VOCAB_SIZE, Reply, fake_row
from support.http.admin_plane import AdminPlane, admin_client, assert_problem
from support.http.whole_server import WholeServer, bearer, whole_server

VERSION = "/tenants/acme/adapters/support/versions/v1"
AGREEMENT = f"{VERSION}/agreement"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path)
    made.make_tenant("acme")
    made.make_adapter()
    yield made
    made.close()


async def test_the_report_is_answered_and_kept(plane: AdminPlane) -> None:
    body = {"tokens": [[1, 2, 3], [4, 5]], "logprobs": [[None, -1, -1.5], [-0.5]]}
    async with admin_client(plane.app, plane.make_key("acme", "adapters:train")) as trainer:
        answer = await trainer.post(AGREEMENT, json=body)
        assert answer.status_code == 200, answer.text
    found = answer.json()
    info = plane.services.catalog.get_version("acme", "support", "v1")
    kl = found.pop("kl")
    assert kl == pytest.approx(((0.6065306597 - 0.5) + (1.6487212707 - 1.5)) / 3)
    assert found == {
        "name": "support", "version": "v1", "digest": info.digest, "base_fingerprint": info.base_fingerprint,
        "dtype": "float32", "mean": pytest.approx(1 / 3), "max": 0.5, "bias": 0.0, "tokens": 3,
        "sequences": [
            {"mean": 0.25, "max": 0.5, "max_at": 2, "differences": [0.0, -0.5]},
            {"mean": 0.5, "max": 0.5, "max_at": 1, "differences": [0.5]},
        ],
    }  # fmt: skip
    async with admin_client(plane.app) as admin:
        report = (await admin.get(VERSION)).json()["report"]
        assert report["agreement"] == {"mean": found["mean"], "max": 0.5, "bias": 0.0, "kl": kl, "tokens": 3}
        assert report["checks"]
        # Again, for one sequence: its figures take the place of the first.
        again = await admin.post(AGREEMENT, json={"tokens": [1, 2], "logprobs": [-1]})
        assert (again.status_code, again.json()["max"]) == (200, 0.0)
        assert (await admin.get(VERSION)).json()["report"]["agreement"]["tokens"] == 1
    rows = plane.services.audit.list(AuditFilter(action="version.agreement"), limit=10).items
    assert [(row.outcome, (row.after or {})["tokens"]) for row in rows] == [("done", 1), ("done", 3)]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, "tokens"),
    ({"tokens": [1]}, "tokens.0"),
    ({"tokens": [[1, 2], 3]}, "tokens"),
    ({"tokens": [[1, 2], [3]]}, "logprobs"),
    ({"tokens": [1, True]}, "tokens.0.1"),
    ({"tokens": [1, -1]}, "tokens.0.1"),
    ({"tokens": [1, VOCAB_SIZE]}, "tokens.0.1"),
    ({"tokens": [1, 2.0]}, "tokens.0.1"),
    ({"tokens": [[1, [2]]]}, "tokens.0.1"),
    ({"tokens": [1] * 4097, "logprobs": [-1] * 4096}, "tokens.0"),
    ({"tokens": [[1] * 4096] * 3, "logprobs": [[-1] * 4095] * 3}, "tokens"),
    ({"tokens": [[1, 2]] * (MAX_SEQUENCES + 1), "logprobs": [[-1]] * (MAX_SEQUENCES + 1)}, "tokens"),
    ({"logprobs": []}, "logprobs"),
    ({"logprobs": [None, -1, -1]}, "logprobs.0"),
    ({"logprobs": [-1, -1]}, "logprobs.0.0"),
    ({"logprobs": [None, None]}, "logprobs.0.1"),
    ({"logprobs": [None, 0.5]}, "logprobs.0.1"),
    ({"logprobs": [None, -1e7]}, "logprobs.0.1"),
    ({"logprobs": [None, "-1"]}, "logprobs.0.1"),
    ({"logprobs": [None, False]}, "logprobs.0.1"),
]


@pytest.mark.parametrize(("given", "param"), WRONG)
async def test_what_is_wrong_is_named_before_anything_is_computed(
    plane: AdminPlane, given: dict[str, Any], param: str
) -> None:
    async def score(*_: object) -> list[list[float]]:
        raise AssertionError("it is computed")

    object.__setattr__(plane.services, "score", score)
    body = {"tokens": [1, 2], "logprobs": [None, -1]} | given
    async with admin_client(plane.app) as admin:
        problem = assert_problem(await admin.post(AGREEMENT, json=body), 400, "invalid_value")
    assert problem["param"] == param


async def test_json_without_numbers_and_bodies_without_bounds(plane: AdminPlane) -> None:
    typed = {"content-type": "application/json"}
    async with admin_client(plane.app) as admin:
        for text in ("NaN", "-Infinity", "1e999"):
            body = f'{{"tokens": [1, 2], "logprobs": [null, {text}]}}'
            answer = await admin.post(AGREEMENT, content=body, headers=typed)
            assert answer.status_code == 400, answer.text
        most = {"tokens": [[12345678] * 512] * 16, "logprobs": [[-12.345678901234567] * 512] * 16}
        assert len(json.dumps(most)) < 256 << 10, f"{MAX_TOKENS} tokens fit into a body"
        answer = await admin.post(AGREEMENT, content=b" " * (257 << 10), headers=typed)
        assert_problem(answer, 413, "request_too_large")


async def test_only_a_ready_version_of_the_own_tenant(plane: AdminPlane) -> None:
    plane.make_tenant("rival")
    body = {"tokens": [1, 2], "logprobs": [None, -1]}
    for scopes in (["adapters:read", "adapters:write", "inference"], ["adapters:train"]):
        tenant = "acme" if len(scopes) > 1 else "rival"
        async with admin_client(plane.app, plane.make_key(tenant, *scopes)) as other:
            answer = await other.post(AGREEMENT, json=body)
            code = (403, "insufficient_scope") if tenant == "acme" else (404, "tenant_not_found")
            assert_problem(answer, *code)
    version = plane.make_adapter(seed=2, check=True)
    async with admin_client(plane.app) as admin:
        answer = await admin.post(AGREEMENT.replace("v1", version), json=body)
        assert "validating" in assert_problem(answer, 409, "conflict")["detail"]
        answer = await admin.post(AGREEMENT.replace("v1", "v9"), json=body)
        assert_problem(answer, 404, "version_not_found")


# The tokens through the engine, as a request of the tenant.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WholeServer]:
    with whole_server(tmp_path) as made:
        made.plane.make_tenant("acme", limits={"tokens_per_minute": 40})
        made.plane.make_adapter()
        yield made
        made.settle()


def ask(server: WholeServer, key: str, ids: list[int], url: str | None = None) -> httpx.Response:
    body = {"tokens": ids, "logprobs": [None, *(fake_row(one, at, 0)[0] for at, one in enumerate(ids) if at)]}
    path = f"{url or server.data_url}/admin/v1{AGREEMENT}"
    return server.http.post(path, json=body, headers=bearer(key))


def test_it_is_a_request_of_its_tenant(server: WholeServer) -> None:
    key = server.plane.make_key("acme", "adapters:train")
    ids = [104, 105, 200, 33]
    answer = ask(server, key, ids)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["max"], answer.json()["tokens"]) == (0.0, 3)
    [request] = server.plane.engine.requests
    assert request.adapter is not None
    assert (request.tenant_id, request.adapter.version, request.prompt_ids) == ("acme", 1, tuple(ids))
    assert (request.sampling.max_tokens, request.background) == (0, False)
    told = server.http.get(f"{server.admin_url}/metrics").text
    assert 'loraplex_agreement_mean_nats_bucket{le="1e-06"} 1.0' in told
    refused = ask(server, key, ids * 11)
    assert "40" in assert_problem(refused, 400, "invalid_value")["detail"]
    assert ask(server, key, ids * 9).status_code == 200
    limited = ask(server, key, ids)
    assert_problem(limited, 429, "rate_limit_exceeded")
    assert limited.headers["retry-after"]


def test_failures_of_the_engine_are_told(server: WholeServer) -> None:
    key = server.plane.make_key("acme", "adapters:train")
    server.plane.engine.script(Reply(error=("adapter_unavailable", "no room")))
    assert_problem(ask(server, key, [1, 2]), 503, "adapter_unavailable")
    server.plane.engine.script(Reply(error=("adapter_not_finite", "infinite")))
    assert_problem(ask(server, key, [1, 2]), 400, "adapter_not_finite")


async def test_a_series_version_is_compared_like_any_other(plane: AdminPlane) -> None:
    plane.services.series.put(
        "acme", "support", SeriesRules(keep_last=2, check_every=1, config=peft_config(r=4))
    )
    async with admin_client(plane.app, plane.make_key("acme", "adapters:train")) as trainer:
        answer = await trainer.post(AGREEMENT, json={"tokens": [1, 2], "logprobs": [None, -1]})
        assert answer.status_code == 200, answer.text
