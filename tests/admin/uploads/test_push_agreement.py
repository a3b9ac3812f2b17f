"""Pushes to a series that holds each version to its trainer's log probabilities: who serves, and who never does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loraplex.admin import admission
from loraplex.admin.uploads.push_form import MAX_AGREEMENT_BYTES
from loraplex.api.errors import ApiError
from loraplex.control.audit.log import AuditFilter
from loraplex.control.catalog import quota
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.catalog.series import SeriesRules
from loraplex.control.errors import AdapterUnavailable, ModelNotFound
from loraplex.control.types import Principal, VersionInfo
from loraplex.lifecycle import version_checks
from loraplex.lifecycle.agreement_checks import MOST_FAILURES
from loraplex.serving.errors import EngineLost, EngineOverloaded, ScoringRefused
from support.adapters.drafts import draft_adapter, peft_config
from support.control.plane import caller
from support.engine.fake_engine import VOCAB_SIZE
from support.engine.fake_processes import until
from support.http.admin_plane import (
    ARCH,
    SERVED_NAME,
    AdminPlane,
    adapter_files,
    admin_client,
    assert_problem,
    fake_score,
)

CONFIG = peft_config(r=4, target_modules=["q_proj", "v_proj"])
SERIES = "/tenants/acme/adapters/run/series"
PUSH = f"{SERIES}/versions"
VERSIONS = "/tenants/acme/adapters/run/versions"
TOKENS = [[1, 2, 3], [4, 5]]
AGREEING = {"tokens": TOKENS, "logprobs": [[None, -1, -1.002], [-1]]}
"""The plane's engine gives each token -1."""
WRONG = {"tokens": TOKENS, "logprobs": [[None, -1, -3], [-1]]}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path, max_upload_bytes=1 << 20, wait_s=60.0)
    made.make_tenant("acme")
    yield made
    assert made.leftovers() == []
    made.check_integrity()
    made.close()


def tensors(plane: AdminPlane, seed: int) -> bytes:
    return draft_adapter(ARCH, seed=seed).write(plane.root / f"a{seed}").tensors.read_bytes()


async def put(plane: AdminPlane, **changes: Any) -> None:
    rules = {"keep_last": 4, "check_every": 100, "config": CONFIG, "agree_within": 0.01} | changes
    async with admin_client(plane.app) as admin:
        answer = await admin.put(SERIES, json=rules)
        assert answer.status_code == 200, answer.text
        assert answer.json()["agree_within"] == rules["agree_within"]


async def push(
    plane: AdminPlane,
    seed: int,
    numbers: Any,
    *,
    secret: str | None = None,
    files: Any = None,
    tenant: str = "acme",
) -> httpx.Response:
    """Push a form: the tensors of a seed, and `numbers` as JSON or as they are."""
    agreement = numbers if isinstance(numbers, bytes) else json.dumps(numbers).encode()
    form = {"adapter_model.safetensors": tensors(plane, seed), "agreement": (None, agreement)}
    secret = secret or plane.make_key(tenant, "adapters:train")
    async with admin_client(plane.app, secret) as client:
        return await client.post(PUSH.replace("acme", tenant), files=form if files is None else files)


async def served(plane: AdminPlane, model: str = "run") -> str:
    """The version that a request for the name gets, by a server that just began."""
    resolver = Resolver(plane.database, served_name=SERVED_NAME, started_at=1)
    found = await resolver.resolve(caller("acme"), model)
    assert found.adapter is not None
    return f"v{found.adapter.version}"


def states(plane: AdminPlane) -> list[str]:
    return [info.state for info in plane.services.catalog.list_versions("acme", "run").items]


class Gate:
    """Scores as the plane does, once it is open. `charged` has who paid."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.charged: list[Principal] = []

    async def __call__(
        self, principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        self.charged.append(principal)
        await self.open.wait()
        return await fake_score(principal, info, prompts)


async def test_a_version_that_agrees_serves_with_the_figures_in_its_report(plane: AdminPlane) -> None:
    await put(plane)
    for number in (1, 2):
        answer = await push(plane, number, AGREEING)
        assert answer.status_code == 201, answer.text
        version = answer.json()
        assert (version["version"], version["state"]) == (f"v{number}", "ready")
        assert version["checked"] == ("numbers" if number == 1 else "structure")
        assert (version["report"]["reference_error"] is None) == (number == 2)
        assert version["report"]["agreement"]["mean"] == pytest.approx(0.002 / 3)
        assert version["report"]["agreement"]["tokens"] == 3
        assert await served(plane) == f"v{number}"
    assert plane.measure.measured == ["run@v1"]
    assert plane.agreement_watch.outcomes == ["agreed", "agreed"]
    checks = plane.services.audit.list(AuditFilter(action="version.check")).items
    assert [(row.after or {})["agreement"]["tokens"] for row in checks] == [3, 3]


async def test_a_version_that_disagrees_serves_nobody(plane: AdminPlane) -> None:
    await put(plane)
    assert (await push(plane, 1, AGREEING)).status_code == 201
    problem = assert_problem(await push(plane, 2, WRONG), 422, "agreement_exceeded")
    assert "by 0.667 nats on average, and the series has agree_within 0.01" in problem["detail"]
    assert "the largest difference is 2 (token 2 of sequence 0)" in problem["detail"]
    assert problem["version"] == "v2"
    assert problem["report"]["agreement"]["mean"] == pytest.approx(2 / 3)
    assert (states(plane), await served(plane)) == (["ready", "rejected"], "v1")
    with pytest.raises(ModelNotFound):
        await served(plane, "run@v2")
    digest = plane.services.catalog.get_version("acme", "run", "v2").digest
    assert digest not in plane.services.artifacts.store.digests()
    assert plane.engine.drops == [digest]
    assert plane.agreement_watch.outcomes == ["agreed", "exceeded"]
    # The same bytes with what their trainer computed are another version, and are checked in full.
    answer = await push(plane, 2, AGREEING)
    assert (answer.status_code, answer.json()["version"], answer.json()["checked"]) == (201, "v3", "numbers")
    assert await served(plane) == "v3"


async def test_the_first_version_of_a_name_waits_as_any_other(plane: AdminPlane) -> None:
    await put(plane, check_every=1)
    assert_problem(await push(plane, 1, WRONG), 422, "agreement_exceeded")
    with pytest.raises(ModelNotFound):
        await served(plane)


async def test_nobody_is_served_before_the_verdict(plane: AdminPlane) -> None:
    await put(plane)
    await push(plane, 1, AGREEING)
    gate = plane.score = Gate()
    key, secret = plane.services.keys.create("acme", scopes=["adapters:train"])
    pushing = asyncio.create_task(push(plane, 2, AGREEING, secret=secret))
    await until(lambda: bool(gate.charged))
    assert (states(plane), await served(plane)) == (["ready", "validating"], "v1")
    with pytest.raises(AdapterUnavailable):
        await served(plane, "run@v2")
    gate.open.set()
    assert (await pushing).status_code == 201
    assert await served(plane) == "v2"
    # The key that pushed is charged.
    [who] = gate.charged
    assert (who.tenant_id, who.key_id) == ("acme", key.id)


@pytest.mark.parametrize("numbers", [AGREEING, WRONG], ids=["agrees", "disagrees"])
async def test_a_version_whose_server_died_before_the_verdict_gets_one_from_the_next(
    plane: AdminPlane, tmp_path: Path, numbers: dict[str, Any]
) -> None:
    await put(plane)
    await push(plane, 1, AGREEING)
    gate = plane.score = Gate()
    pushing = asyncio.create_task(push(plane, 2, numbers))
    await until(lambda: bool(gate.charged))
    pushing.cancel()
    for task in plane.checks._running.values():
        task.cancel()
    # Two servers begin on the same database, as replicas do.
    others = [await asyncio.to_thread(AdminPlane, tmp_path) for _ in range(2)]
    await asyncio.to_thread(others[0].start)
    for other in others:
        assert (states(other), await served(other)) == (["ready", "validating"], "v1")
    running = [asyncio.create_task(other.checks.run()) for other in others]
    await until(lambda: "validating" not in states(plane))
    agrees = numbers is AGREEING
    assert states(plane) == ["ready", "ready" if agrees else "rejected"]
    assert await served(plane) == ("v2" if agrees else "v1")
    found = plane.services.catalog.get_version("acme", "run", "v2").report
    assert found["agreement"]["mean"] == pytest.approx(0.002 / 3 if agrees else 2 / 3)
    for task, other in zip(running, others, strict=True):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        other.close()


async def test_the_threshold_of_the_push_holds_whatever_becomes_of_the_rules(plane: AdminPlane) -> None:
    await put(plane)
    gate = plane.score = Gate()
    pushing = asyncio.create_task(push(plane, 1, WRONG))
    await until(lambda: bool(gate.charged))
    await put(plane, agree_within=None)
    gate.open.set()
    assert_problem(await pushing, 422, "agreement_exceeded")


async def test_the_same_bytes_are_held_to_the_new_numbers_too(plane: AdminPlane) -> None:
    """A trainer that pushes its old weights by mistake hears of it."""
    await put(plane)
    await push(plane, 1, AGREEING)
    problem = assert_problem(await push(plane, 1, WRONG), 422, "agreement_exceeded")
    assert "The bytes are those of run@v1, which stays as it is" in problem["detail"]
    assert (problem["version"], problem["report"]["agreement"]["max"]) == ("v1", 2.0)
    kept = plane.services.catalog.get_version("acme", "run", "v1").report["agreement"]
    assert kept["mean"] == pytest.approx(0.002 / 3)
    again = await push(plane, 1, {"tokens": [1, 2], "logprobs": [-1]})
    assert (again.status_code, again.json()["version"]) == (200, "v1")
    assert again.json()["report"]["agreement"]["tokens"] == 1
    assert (states(plane), await served(plane)) == (["ready"], "v1")


async def test_the_same_bytes_have_an_answer_in_time(plane: AdminPlane) -> None:
    """Whatever the comparison comes to: nothing goes on trying, and the trainer pushes again."""
    await put(plane)
    assert (await push(plane, 1, AGREEING)).status_code == 201
    plane.checks.wait_s = 0.05
    for score in (
        Gate(),
        failing(1, lambda: ApiError("rate_limit_exceeded", "It is too much.")),
        failing(1, lambda: EngineLost("The engine died.")),
    ):
        plane.score = score
        problem = assert_problem(await push(plane, 1, AGREEING), 503, "numbers_unchecked")
        assert "run@v1 has these bytes and stays as it is" in problem["detail"]
    assert (states(plane), await served(plane)) == (["ready"], "v1")


async def test_the_wait_for_a_verdict_and_the_comparison_have_one_time(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second push of the bytes waits for the first one's verdict, and is then compared itself."""
    confirm, now, asked, left = plane.checks.agreements.confirm, [0.0], [], []

    def clock() -> float:
        asked.append(now[0])
        return now[0]

    async def confirm_within(*args: Any, wait_s: float) -> VersionInfo:
        left.append(wait_s)
        return await confirm(*args, wait_s=wait_s)

    await put(plane)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(plane.checks.agreements, "confirm", confirm_within)
    gate = plane.score = Gate()
    pushes = []
    for count in (1, 2):
        pushes.append(asyncio.create_task(push(plane, 1, AGREEING)))
        await until(lambda count=count: len(asked) == count)
    now[0] = 2.0
    gate.open.set()
    assert [(await one).status_code for one in pushes] == [201, 200]
    assert left == [plane.checks.wait_s - 2.0]


async def test_few_versions_of_a_tenant_wait_for_their_comparison(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers are in the database, and count for no quota of bytes."""
    monkeypatch.setattr(quota, "MAX_COMPARISONS", 2)
    await put(plane)
    gate = plane.score = Gate()
    pushes = [asyncio.create_task(push(plane, 1, AGREEING))]
    await until(lambda: bool(gate.charged))
    pushes.append(asyncio.create_task(push(plane, 2, AGREEING)))
    await until(lambda: len(states(plane)) == 2)
    problem = assert_problem(await push(plane, 3, AGREEING), 429, "rate_limit_exceeded")
    assert "2 versions of the tenant wait for the comparison with their trainer" in problem["detail"]
    # What waits already may be pushed again, and another tenant may push.
    pushes.append(asyncio.create_task(push(plane, 2, AGREEING)))
    plane.make_tenant("rival")
    plane.services.series.put("rival", "run", SeriesRules(4, 100, config=CONFIG, agree_within=0.01))
    pushes.append(asyncio.create_task(push(plane, 3, AGREEING, tenant="rival")))
    await until(lambda: bool(plane.services.catalog.list_adapters("rival").items))
    gate.open.set()
    assert [(await one).status_code for one in pushes] == [201, 201, 200, 201]
    assert (await push(plane, 3, AGREEING)).status_code == 201


async def test_pushes_without_numbers_are_refused_whichever_way_they_come(
    plane: AdminPlane, tmp_path: Path
) -> None:
    await put(plane)
    key = plane.make_key("acme", "adapters:train", "adapters:write")
    async with admin_client(plane.app, key) as client:
        for call in (
            client.post(PUSH, content=b"x", headers={"content-type": "application/octet-stream"}),
            client.post(VERSIONS, files=adapter_files(tmp_path / "up", seed=3)),
            client.post(VERSIONS, json={"source": f"file://{tmp_path.resolve()}/up"}),
        ):
            problem = assert_problem(await call, 422, "agreement_missing")
            assert problem["param"] == "agreement"
            assert "the parts adapter_model.safetensors and agreement" in problem["detail"]
    assert not plane.services.catalog.list_adapters("acme").items


async def test_numbers_that_nothing_holds_a_version_to_are_refused(plane: AdminPlane) -> None:
    await put(plane, agree_within=None)
    assert_problem(await push(plane, 1, AGREEING), 409, "conflict")
    assert not plane.services.catalog.list_adapters("acme").items


MOST = {"tokens": [[200000] * 512] * 16, "logprobs": [[-1.2345678901234567e-05] * 511] * 16}
HOSTILE: list[tuple[Any, str]] = [
    (MOST, "agreement.tokens.0.0"),
    (b"", "agreement"),
    (b"[]", "agreement"),
    (b"\xff", "agreement"),
    (b'{"tokens": [1, 2], "logprobs": [null, NaN]}', "agreement"),
    (b'{"tokens": [1, 2], "logprobs": [null, -Infinity]}', "agreement"),
    (b'{"tokens": [1, 2], "logprobs": [null, -1e999]}', "agreement.logprobs.0.1"),
    (b"[" * 100_000, "agreement"),
    ({"tokens": TOKENS}, "agreement.logprobs"),
    ({"tokens": [1, 2], "logprobs": [None, "x"]}, "agreement.logprobs.0.1"),
    ({"tokens": [1, 2], "logprobs": [None, -1, -1]}, "agreement.logprobs.0"),
    ({"tokens": [[1, 2]], "logprobs": [[-1], [-1]]}, "agreement.logprobs"),
    ({"tokens": [1, VOCAB_SIZE], "logprobs": [-1]}, "agreement.tokens.0.1"),
    ({"tokens": [[1] * 4096] * 3, "logprobs": [[-1] * 4095] * 3}, "agreement.tokens"),
    ({"tokens": [[1, 2]] * 17, "logprobs": [[-1]] * 17}, "agreement.tokens"),
]


async def test_hostile_numbers_are_named_before_anything_is_done(plane: AdminPlane) -> None:
    await put(plane)

    async def never(*_: object) -> list[list[float]]:
        raise AssertionError("it is computed")

    plane.score = never
    for numbers, param in HOSTILE:
        problem = assert_problem(await push(plane, 1, numbers), 400, "invalid_value")
        assert problem["param"] == param, problem
    assert_problem(await push(plane, 1, b" " * (MAX_AGREEMENT_BYTES + 1)), 413, "too_large")
    assert_problem(await push(plane, 1, AGREEING | {"more": 1}), 400, "unknown_field")
    whole, part = tensors(plane, 1), ("agreement", (None, json.dumps(AGREEING).encode()))
    weights = ("adapter_model.safetensors", whole)
    for files, told in (
        ([weights, ("other", b"x")], "other"),
        ([weights, part, part], "agreement"),
        ([weights, weights, part], "adapter_model.safetensors"),
        ([weights], "agreement"),
        ([part], "adapter_model.safetensors"),
    ):
        problem = assert_problem(await push(plane, 1, b"", files=files), 400, "invalid_multipart")
        assert problem["param"] == told
    large = [("adapter_model.safetensors", b"x" * (2 << 20)), part]
    assert_problem(await push(plane, 1, b"", files=large), 413, "too_large")
    for within in (0, -1, 101, "x"):
        async with admin_client(plane.app) as admin:
            answer = await admin.put(SERIES, json={"config": CONFIG, "agree_within": within})
            assert_problem(answer, 400, "invalid_value")
    assert not plane.services.catalog.list_adapters("acme").items
    assert plane.measure.measured == []


def failing(times: int, error: Callable[[], Exception]) -> Callable[..., Awaitable[list[list[float]]]]:
    left = [times]

    async def score(
        principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        if left[0]:
            left[0] -= 1
            raise error()
        return await fake_score(principal, info, prompts)

    return score


async def test_tokens_that_cannot_be_computed_reject_the_version(plane: AdminPlane) -> None:
    await put(plane)
    plane.score = failing(
        1, lambda: ScoringRefused("adapter_not_finite", "The adapter's outputs are infinite.")
    )
    problem = assert_problem(await push(plane, 1, AGREEING), 422, "agreement_failed")
    assert problem["detail"].endswith("trainer's tokens: The adapter's outputs are infinite.")
    assert (states(plane), plane.agreement_watch.outcomes) == (["rejected"], ["failed"])


@pytest.mark.parametrize("code", ["deadline_exceeded", "adapter_unavailable"])
async def test_what_fails_each_time_waits_for_a_bounded_number_of_tries(
    plane: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    for name in ("FIRST_RETRY_S", "_SHORTEST_PAUSE_S"):
        monkeypatch.setattr(version_checks, name, 0.01)
    await put(plane)
    plane.score = failing(MOST_FAILURES - 1, lambda: ApiError(code, "It cannot fit."))
    assert_problem(await push(plane, 1, AGREEING), 503, "numbers_unchecked")
    await run_until_decided(plane)
    assert states(plane) == ["ready"]
    # The tries count on when another server goes on.
    plane.score = failing(2, lambda: ApiError(code, "It cannot fit."))
    assert_problem(await push(plane, 2, AGREEING), 503, "numbers_unchecked")
    other = await asyncio.to_thread(AdminPlane, tmp_path)
    other.score = failing(MOST_FAILURES - 1, lambda: ApiError(code, "It cannot fit."))
    await run_until_decided(other)
    assert states(plane) == ["ready", "rejected"]
    refusal = other.services.catalog.get_version("acme", "run", "v2").report["refusal"]
    assert refusal["message"].endswith(f"trainer's tokens: It cannot fit ({MOST_FAILURES} times)")
    other.close()


async def run_until_decided(plane: AdminPlane) -> None:
    """Check in the background, as a server does."""
    running = asyncio.create_task(plane.checks.run())
    await until(lambda: "validating" not in states(plane))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_busy_engine_delays_the_verdict(plane: AdminPlane) -> None:
    await put(plane)
    plane.score = failing(1, lambda: EngineOverloaded("Too much runs."))
    assert (await push(plane, 1, AGREEING)).status_code == 201
    assert plane.outcomes == ["unchecked", "ready"]


async def test_a_version_that_ends_the_engine_twice_is_rejected(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_PAUSE_S", "FIRST_RETRY_S"):
        monkeypatch.setattr(version_checks, name, 0.02)
    await put(plane)
    plane.score = failing(2, lambda: EngineLost("The engine died."))
    assert_problem(await push(plane, 1, AGREEING), 422, "numerical_crash")
    assert states(plane) == ["rejected"]
