"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` as training loops use them, on a whole server."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.store.files import TENSORS_NAME
from loraplex.control.audit.log import AuditFilter
from support.adapters.drafts import make_adapter
from support.adapters.mlx_adapters import MLX_TENSORS, mlx_config, mlx_tensors, write_mlx
from support.http.admin_plane import ADMIN_TOKEN, ARCH
from support.http.whole_server import WholeServer, bearer, whole_server
from support.waiting import eventually


class Loop:
    """A training loop of the tenant `acme`, which may write into `folder`."""

    def __init__(self, server: WholeServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        server.plane.make_tenant("acme")
        server.plane.make_tenant("rival")
        self.key = server.plane.make_key("acme", "inference", "adapters:read", "adapters:write")

    def checkpoint(self, name: str, seed: int = 1, tenant: str = "acme") -> Path:
        path = self.folder / tenant / name
        path.mkdir(parents=True)
        make_adapter(path, ARCH, seed=seed)
        return path

    def post(self, what: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        url = f"{self.server.data_url}/v1/{what}_lora_adapter"
        return self.server.http.post(url, json=body, **{"headers": bearer(self.key), **options})

    def load(
        self, name: str, path: Path | str, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), **more}
        return self.post("load", body, headers=headers or bearer(self.key))

    def error(self, answer: httpx.Response) -> tuple[int, str, str | None]:
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    def released(self, name: str) -> list[tuple[str, int]]:
        release = self.server.plane.services.releases.get("acme", name)
        return [(target.version, target.weight) for target in release.targets]

    def digest_served(self, name: str) -> str:
        url = f"{self.server.data_url}/v1/models/{name}"
        return str(self.server.http.get(url, headers=bearer(self.key)).json()["root"])

    def rows(self, action: str) -> list[Any]:
        return list(self.server.plane.services.audit.list(AuditFilter(action=action), limit=100).items)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with whole_server(
        tmp_path_factory.mktemp("server"), adapter_sources=[f"file://{folder}/{{tenant}}"]
    ) as server:
        made = Loop(server, folder)
        yield made
        server.settle()
        server.plane.check_integrity()


def test_the_same_name_again_is_the_next_version_and_released_at_once(loop: Loop) -> None:
    for number in (1, 2, 3):
        answer = loop.load("policy", loop.checkpoint(f"policy-{number}", seed=number), load_inplace=False)
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'policy' added successfully."
        assert answer.headers["content-type"].startswith("text/plain")
        assert loop.released("policy") == [(f"v{number}", 100)]
    versions = loop.server.plane.services.catalog.list_versions("acme", "policy").items
    assert [version.state for version in versions] == ["ready"] * 3
    assert loop.digest_served("policy") == versions[2].digest
    assert loop.digest_served("policy@v1") == versions[0].digest
    # The check of its numbers has brought each one to the device.
    assert loop.server.plane.measure.measured[-3:] == [f"policy@v{number}" for number in (1, 2, 3)]


def test_the_same_bytes_again_are_released_again(loop: Loop) -> None:
    first, second = (loop.checkpoint(f"again-{seed}", seed=seed) for seed in (11, 12))
    for path in (first, second, first):
        assert loop.load("again", path, load_inplace=True).status_code == 200
    assert loop.released("again") == [("v1", 100)]


def test_unloading_ends_the_name(loop: Loop) -> None:
    path = loop.checkpoint("short", seed=21)
    assert loop.load("short", path).status_code == 200
    answer = loop.post("unload", {"lora_name": "short"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'short' removed successfully.")
    again = loop.post("unload", {"lora_name": "short"})
    assert loop.error(again) == (404, "model_not_found", "lora_name")
    assert again.json()["error"]["message"] == "The lora adapter 'short' cannot be found."
    listed = loop.server.http.get(f"{loop.server.data_url}/v1/models", headers=bearer(loop.key)).json()
    assert "short" not in {model["id"] for model in listed["data"]}
    # A number is never used twice.
    assert loop.load("short", path).status_code == 200
    assert loop.released("short") == [("v2", 100)]


def test_what_is_wrong_is_said_in_vllms_statuses(loop: Loop) -> None:
    path = loop.checkpoint("wrong", seed=31)
    both = "Both 'lora_name' and 'lora_path' must be provided."
    for body in ({"lora_name": "", "lora_path": str(path)}, {"lora_name": "wrong", "lora_path": ""}):
        answer = loop.post("load", body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, both)
    assert loop.error(loop.post("load", {"lora_name": "wrong"})) == (400, "invalid_value", "lora_path")
    assert loop.error(loop.load("wrong", path, is_3d_lora_weight=True))[:2] == (400, "unsupported_field")
    assert loop.error(loop.load("wrong", path, strange=1)) == (400, "unsupported_field", "strange")
    assert loop.error(loop.load("No Name", path)) == (400, "invalid_value", "lora_name")
    assert loop.error(loop.load("tiny", path)) == (400, "name_reserved", "lora_path")
    assert loop.error(loop.load("wrong", path / "nothing")) == (404, "source_not_found", "lora_path")
    (path / TENSORS_NAME).write_bytes(b"not safetensors")
    assert loop.error(loop.load("wrong", path)) == (400, "not_safetensors", "lora_path")
    assert loop.server.plane.leftovers() == []


def test_checkpoints_of_mlx_and_pointers_of_git_lfs(loop: Loop) -> None:
    path = loop.checkpoint("other", seed=32)
    for file in path.iterdir():
        file.unlink()
    write_mlx(path, mlx_config(), mlx_tensors(ARCH))
    assert loop.load("other", path).status_code == 200
    assert loop.released("other") == [("v1", 100)]
    (path / MLX_TENSORS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    refused = loop.load("pointer", path)
    assert loop.error(refused) == (400, "not_safetensors", "lora_path")
    assert "git lfs pull" in refused.json()["error"]["message"]


def test_no_database_sees_what_no_name_has(loop: Loop) -> None:
    """PostgreSQL refuses NUL in any text, also in a row of the audit log."""
    path = loop.checkpoint("nul", seed=33)
    assert loop.error(loop.load("n\0l", path)) == (400, "invalid_value", "lora_name")
    assert loop.error(loop.post("unload", {"lora_name": "n\0l"})) == (404, "model_not_found", "lora_name")
    targets = [row.target for action in ("version.upload", "adapter.delete") for row in loop.rows(action)]
    assert {"tenants/acme/adapters/n?l/versions", "tenants/acme/adapters/n?l"} <= set(targets)
    assert all(target.isprintable() for target in targets)


def test_nothing_outside_and_nothing_of_another_tenant(loop: Loop) -> None:
    foreign = loop.checkpoint("theirs", seed=41, tenant="rival")
    link = loop.folder / "acme" / "link"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("../rival/theirs")
    wanted = {
        foreign: "source_not_allowed",
        link: "source_not_allowed",
        f"{loop.folder}/acme/../rival/theirs": "source_not_allowed",
        f"/proc/self/root{loop.folder}/acme/theirs": "source_not_allowed",
        "/etc": "source_not_allowed",
        "s3://bucket/x": "source_not_allowed",
    }
    for path, code in wanted.items():
        assert loop.error(loop.load("stolen", path)) == (403, code, "lora_path"), path
    refused = [row for row in loop.rows("version.upload") if row.outcome == "refused"]
    assert len([row for row in refused if row.code == "source_not_allowed"]) == len(wanted)


def test_a_fifo_keeps_nobody_waiting(loop: Loop) -> None:
    path = loop.checkpoint("fifo", seed=51)
    (path / TENSORS_NAME).unlink()
    os.mkfifo(path / TENSORS_NAME)
    assert loop.error(loop.load("fifo", path)) == (404, "source_not_found", "lora_path")


def test_a_load_is_in_the_audit_log_with_its_source(loop: Loop) -> None:
    path = loop.checkpoint("logged", seed=61)
    assert loop.load("logged", path).status_code == 200
    row = next(row for row in loop.rows("version.upload") if "/logged/" in row.target)
    assert row.after["source"] == f"file://{path}"
    assert (row.by.kind, row.tenant_id) == ("key", "acme")


def test_the_scope_is_needed_and_a_key_may_come_in_a_url(loop: Loop) -> None:
    path = loop.checkpoint("scoped", seed=71)
    body = {"lora_name": "scoped", "lora_path": str(path)}
    reader = loop.server.plane.make_key("acme", "inference", "adapters:read")
    assert loop.error(loop.post("load", body, headers=bearer(reader)))[:2] == (403, "insufficient_scope")
    assert loop.error(loop.post("load", body, headers=bearer(ADMIN_TOKEN)))[:2] == (403, "insufficient_scope")
    basic = base64.b64encode(f"key:{loop.key}".encode()).decode()
    assert loop.post("load", body, headers={"authorization": f"Basic {basic}"}).status_code == 200
    for value in (f"Basic {loop.key}", "Basic " + base64.b64encode(loop.key.encode()).decode(), "Basic ?"):
        answer = loop.post("load", body, headers={"authorization": value})
        assert loop.error(answer)[:2] == (401, "invalid_api_key")


def test_a_quota_holds_for_loads_too(loop: Loop) -> None:
    services = loop.server.plane.services
    path = loop.checkpoint("quota", seed=81)
    services.tenants.update("acme", {"limits": {"max_adapter_bytes": 10}})
    try:
        assert loop.error(loop.load("quota", path))[:2] == (400, "quota_exceeded")
    finally:
        services.tenants.update("acme", {"limits": {"max_adapter_bytes": None}})


def test_a_series_takes_loads_of_a_key_that_trains_and_retires_old_versions(loop: Loop) -> None:
    url = f"{loop.server.data_url}/admin/v1/tenants/acme/adapters/steps/series"
    rules = {"keep_last": 1, "check_every": 100}
    assert loop.server.http.put(url, json=rules, headers=bearer(loop.key)).status_code == 200
    paths = [loop.checkpoint(f"steps-{seed}", seed=seed) for seed in (51, 52)]
    assert loop.error(loop.load("steps", paths[0])) == (403, "insufficient_scope", None)
    trains = bearer(loop.server.plane.make_key("acme", "inference", "adapters:write", "adapters:train"))
    for path in paths:
        assert loop.load("steps", path, headers=trains).status_code == 200

    def versions() -> list[tuple[str, str | None]]:
        listed = loop.server.plane.services.catalog.list_versions("acme", "steps").items
        return [(info.state, info.checked) for info in listed]

    eventually(lambda: versions() == [("retired", "numbers"), ("ready", "structure")])
    assert loop.released("steps") == [("v2", 100)]
    for version, told in (("v1", "retired"), ("v3", "does not exist")):
        asked = {"model": f"steps@{version}", "prompt": "a", "max_tokens": 1}
        answer = loop.server.http.post(f"{loop.server.data_url}/v1/completions", json=asked, headers=trains)
        assert loop.error(answer) == (404, "model_not_found", "model")
        assert told in answer.json()["error"]["message"]


@pytest.fixture
def trains(loop: Loop) -> dict[str, str]:
    return bearer(loop.server.plane.make_key("acme", "inference", "adapters:write", "adapters:train"))


def make_series(loop: Loop, name: str, **rules: Any) -> str:
    """The URL of its rules."""
    url = f"{loop.server.data_url}/admin/v1/tenants/acme/adapters/{name}/series"
    body = {"keep_last": 2, "check_every": 100, **rules}
    assert loop.server.http.put(url, json=body, headers=bearer(loop.key)).status_code == 200
    return url


def versions_of(loop: Loop, name: str) -> list[tuple[str, str | None]]:
    listed = loop.server.plane.services.catalog.list_versions("acme", name).items
    return [(info.state, info.checked) for info in listed]


def refused_model(loop: Loop, model: str) -> str:
    """The words in which a request for it is told that it is not there."""
    url = f"{loop.server.data_url}/v1/completions"
    asked = {"model": model, "prompt": "a", "max_tokens": 1}
    answer = loop.server.http.post(url, json=asked, headers=bearer(loop.key))
    assert loop.error(answer) == (404, "model_not_found", "model")
    return str(answer.json()["error"]["message"])


def test_loops_that_unload_a_series_to_load_it_again_stay_in_it(loop: Loop, trains: dict[str, str]) -> None:
    """Unload and load, as vLLM's clients did before `load_inplace`, and SkyRL still may. A loop that is killed between
    the two leaves the rules too."""
    rules = make_series(loop, "rounds")
    before = loop.server.http.get(rules, headers=bearer(loop.key)).json()
    for number in (1, 2, 3):
        path = loop.checkpoint(f"rounds-{number}", seed=110 + number)
        assert loop.load("rounds", path, headers=trains).status_code == 200
        assert loop.released("rounds") == [(f"v{number}", 100)]
        answer = loop.post("unload", {"lora_name": "rounds"}, headers=trains)
        assert (answer.status_code, answer.text[:8]) == (200, "Success:")
        assert "does not exist" in refused_model(loop, "rounds")
        assert "retired" in refused_model(loop, f"rounds@v{number}")
    path = {"model_path": "tinker://rounds/sampler_weights/v1"}
    asked = {"session_id": "s", "sampling_session_seq_id": 0, **path}
    session = f"{loop.server.data_url}/api/v1/create_sampling_session"
    answer = loop.server.http.post(session, json=asked, headers=bearer(loop.key))
    assert loop.error(answer)[:2] == (404, "model_not_found")
    assert "retired" in answer.json()["error"]["message"]
    again = loop.post("unload", {"lora_name": "rounds"}, headers=trains)
    assert loop.error(again) == (404, "model_not_found", "lora_name")
    assert loop.server.http.get(rules, headers=bearer(loop.key)).json() == before
    # The rules are those of one series, whose first version alone had its numbers checked.
    assert versions_of(loop, "rounds") == [("retired", "numbers"), *[("retired", "structure")] * 2]
    # Also for keys: it is still no name that any key may load.
    path = loop.checkpoint("rounds-4", seed=114)
    assert loop.error(loop.load("rounds", path)) == (403, "insufficient_scope", None)
    # The same bytes as those that went are a new version.
    assert loop.load("rounds", path.parent / "rounds-1", headers=trains).status_code == 200
    assert loop.released("rounds") == [("v4", 100)]


def test_a_series_that_is_unloaded_during_its_check_has_the_next_version_checked(
    loop: Loop, trains: dict[str, str]
) -> None:
    make_series(loop, "early")
    server, measure = loop.server, loop.server.plane.measure
    paths = [loop.checkpoint(f"early-{seed}", seed=seed) for seed in (121, 122)]
    server.loop.call_soon_threadsafe(measure.hold)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(loop.load, "early", paths[0], headers=trains)
        try:
            eventually(lambda: measure.num_running == 1)
            assert loop.post("unload", {"lora_name": "early"}, headers=trains).status_code == 200
        finally:
            server.loop.call_soon_threadsafe(measure.release)
        assert loop.error(loading.result(30))[:2] == (404, "model_not_found")
    assert loop.load("early", paths[1], headers=trains).status_code == 200
    assert versions_of(loop, "early") == [("deleted", "numbers"), ("ready", "numbers")]


def test_skyrl_loads_each_step_under_one_name_by_its_own_path(loop: Loop, trains: dict[str, str]) -> None:
    """SkyRL 0.3.0 writes each step into the same folder, and sends no `load_inplace`."""
    make_series(loop, "skyrl-lora", keep_last=1)
    path, url = loop.folder / "acme" / "skyrl", f"{loop.server.data_url}/skyrl/v1/load_lora_adapter"
    path.mkdir(parents=True)
    for seed in (131, 132):
        make_adapter(path, ARCH, seed=seed)
        body = {"lora_name": "skyrl-lora", "lora_path": str(path)}
        assert loop.server.http.post(url, json=body, headers=trains).status_code == 200
    eventually(lambda: versions_of(loop, "skyrl-lora") == [("retired", "numbers"), ("ready", "structure")])
    assert loop.released("skyrl-lora") == [("v2", 100)]
    newest = loop.server.plane.services.catalog.get_version("acme", "skyrl-lora", "v2")
    assert loop.digest_served("skyrl-lora") == newest.digest
    missing = {"lora_name": "skyrl-lora", "lora_path": f"{path}-none"}
    refused = loop.server.http.post(url, json=missing, headers=trains)
    assert loop.error(refused) == (404, "source_not_found", "lora_path")


@pytest.mark.parametrize("what", ["adapter", "tenant"])
def test_what_is_deleted_while_it_is_loaded_cannot_be_found(loop: Loop, what: str) -> None:
    server, measure = loop.server, loop.server.plane.measure
    tenant = f"leaving-{what}"
    server.plane.make_tenant(tenant)
    key = bearer(server.plane.make_key(tenant, "adapters:write"))
    path = loop.checkpoint("late", seed=41, tenant=tenant)
    server.loop.call_soon_threadsafe(measure.hold)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(loop.load, "late", path, headers=key)
        try:
            eventually(lambda: measure.num_running == 1)
            if what == "adapter":
                assert loop.post("unload", {"lora_name": "late"}, headers=key).status_code == 200
            else:
                url = f"{server.admin_url}/admin/v1/tenants/{tenant}"
                assert server.http.delete(url, headers=bearer(ADMIN_TOKEN)).status_code == 200
        finally:
            server.loop.call_soon_threadsafe(measure.release)
        assert loop.error(loading.result()) == (404, "model_not_found", "lora_name")
