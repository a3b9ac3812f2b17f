"""The audit log over HTTP: every route that changes something is in it, done or refused; and who may read it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.admin.app import admin_routes
from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.admin.framework.dependencies import ANY_SCOPE
from loraplex.control.audit.log import AuditEntry, AuditFilter, AuditLog
from loraplex.control.audit.verification import verify
from support.adapters.drafts import draft_adapter, make_adapter
from support.control.batches import make_batch, request_line
from support.control.plane import FakeClock
from support.http.admin_plane import ADMIN_TOKEN, ARCH, AdminPlane, adapter_files, admin_client
from support.placement.fake_cluster import fake_report

ADAPTER = "/tenants/acme/adapters/support"


def steps(tmp_path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """One call of each route that changes something, in an order in which each succeeds. KEY is a key's id."""
    pushed = make_adapter(tmp_path / "v3", ARCH, seed=3)
    return {
        "POST /tenants": ("/tenants", {"json": {"id": "acme", "display_name": "Acme"}}),
        "PATCH /tenants/{tenant}": ("/tenants/acme", {"json": {"weight": 2}}),
        "POST /tenants/{tenant}/keys": ("/tenants/acme/keys", {"json": {"name": "ci"}}),
        "PATCH /tenants/{tenant}/keys/{key}": (
            "/tenants/acme/keys/KEY",
            {"json": {"limits": {"max_concurrency": 2}}},
        ),
        "POST /tenants/{tenant}/keys/{key}/rotate": ("/tenants/acme/keys/KEY/rotate", {}),
        "DELETE /tenants/{tenant}/keys/{key}": ("/tenants/acme/keys/KEY", {}),
        "POST /tenants/{tenant}/adapters/{name}/versions": (
            f"{ADAPTER}/versions",
            {"files": adapter_files(tmp_path / "v2", seed=2)},
        ),
        "PATCH /tenants/{tenant}/adapters/{name}": (ADAPTER, {"json": {"tags": ["eu", "beta"]}}),
        "PUT /tenants/{tenant}/adapters/{name}/versions/{version}/pin": (f"{ADAPTER}/versions/v1/pin", {}),
        "DELETE /tenants/{tenant}/adapters/{name}/versions/{version}/pin": (f"{ADAPTER}/versions/v1/pin", {}),
        "POST /tenants/{tenant}/adapters/{name}/versions/{version}/agreement": (
            f"{ADAPTER}/versions/v1/agreement",
            {"json": {"tokens": [1, 2], "logprobs": [None, -1]}},
        ),
        "PUT /tenants/{tenant}/adapters/{name}/release": (
            f"{ADAPTER}/release",
            {"json": {"targets": [{"version": f"v{number}", "weight": 1} for number in (1, 2)], "guard": {}}},
        ),
        "POST /tenants/{tenant}/adapters/{name}/release/pause": (f"{ADAPTER}/release/pause", {}),
        "POST /tenants/{tenant}/adapters/{name}/release/resume": (f"{ADAPTER}/release/resume", {}),
        "POST /tenants/{tenant}/adapters/{name}/release/rollback": (f"{ADAPTER}/release/rollback", {}),
        "POST /tenants/{tenant}/adapters/{name}/release/promote": (f"{ADAPTER}/release/promote", {}),
        "PUT /tenants/{tenant}/adapters/{name}/series": (
            f"{ADAPTER}/series",
            {"json": {"latest": False, "check_every": 1, "config": json.loads(pushed.config.read_bytes())}},
        ),
        "POST /tenants/{tenant}/adapters/{name}/series/versions": (
            f"{ADAPTER}/series/versions",
            {
                "content": pushed.tensors.read_bytes(),
                "headers": {"content-type": "application/octet-stream"},
            },
        ),
        "DELETE /tenants/{tenant}/adapters/{name}/series": (f"{ADAPTER}/series", {}),
        "DELETE /tenants/{tenant}/adapters/{name}/versions/{version}": (f"{ADAPTER}/versions/v1", {}),
        "DELETE /tenants/{tenant}/adapters/{name}": (ADAPTER, {}),
        "POST /batches/{batch}/cancel": ("/batches/BATCH/cancel", {}),
        "DELETE /tenants/{tenant}": ("/tenants/acme", {}),
        "POST /cluster/replicas/{replica}/drain": ("/cluster/replicas/replica-1/drain", {}),
        "DELETE /cluster/replicas/{replica}/drain": ("/cluster/replicas/replica-1/drain", {}),
    }


def rows(plane: AdminPlane, **chosen: Any) -> list[AuditEntry]:
    """The oldest first."""
    return list(reversed(AuditLog(plane.database).list(AuditFilter(**chosen), limit=500).items))


async def test_every_route_that_changes_something_writes_one_row(
    plane: AdminPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A new route is added to `steps`, and calls `record` in its rule."""
    actions = {row.label: row.action for row in admin_routes() if row.action is not None}
    assert actions.keys() == steps(tmp_path).keys()
    several = [action for action, count in Counter(actions.values()).items() if count > 1]
    assert several == ["version.upload"]  # of both files, and of a series' tensors
    key = batch = ""
    plane.engine.replicas = {name: fake_report(name) for name in ("replica-1", "replica-2")}
    for name, (path, options) in steps(tmp_path).items():
        if name.endswith("/versions"):
            plane.make_adapter(seed=1)  # so that there is one more to delete and to go back to
        if name.startswith("POST /batches"):
            batch = make_batch(plane.database, [request_line(1)]).id
        before = len(rows(plane))
        label = f"of-{actions[name]}"
        place = path.replace("KEY", key).replace("BATCH", batch)
        headers = {"x-request-id": label, **options.pop("headers", {})}
        answer = await admin.request(name.split(" ")[0], place, headers=headers, **options)
        assert answer.is_success, (name, answer.text)
        if name == "POST /tenants/{tenant}/keys":
            key = answer.json()["id"]
        new = rows(plane)[before:]
        made = ["version.upload", "version.check"] if name.endswith("/versions") else [actions[name]]
        assert [(row.action, row.outcome, row.code) for row in new] == [(act, "done", None) for act in made]
        assert (new[0].by.kind, new[0].by.source, new[0].by.request_id) == ("admin", "127.0.0.1", label)
        assert new[0].tenant_id == ("acme" if "/tenants" in name or "/batches" in name else None)
        assert new[0].before is not None or new[0].after is not None
    assert verify(plane.database).whole


async def test_every_route_that_is_refused_writes_one_row(plane: AdminPlane) -> None:
    """Here for want of the right scope."""
    plane.make_tenant()
    secret = plane.make_key("acme", "inference")
    async with admin_client(plane.app, secret) as client:
        for row in (row for row in admin_routes() if row.access != ANY_SCOPE):
            values = {
                "tenant": "acme",
                "name": "support",
                "version": "v9",
                "key": "nokey",
                "replica": "replica-1",
                "batch": "batch_none",
            }
            before = len(rows(plane))
            method = row.label.split(" ")[0]
            answer = await client.request(method, row.template.format(**values))
            assert answer.status_code == 403
            new = rows(plane)[before:]
            if method == "GET":
                assert new == []
                continue
            assert [(r.action, r.outcome, r.code) for r in new] == [
                (row.action, "refused", "insufficient_scope")
            ]
            assert (new[0].by.kind, new[0].by.tenant_id, new[0].by.key_id) == (
                "key",
                "acme",
                secret.split("_")[1],
            )
            assert new[0].target == row.template.format(**values).strip("/")


class TestRefusals:
    async def test_a_refused_upload(self, plane: AdminPlane, tmp_path: Path) -> None:
        plane.make_tenant()
        draft = draft_adapter(ARCH)
        draft.config["r"] = 4096
        made = draft.write(tmp_path / "draft")
        files = {path.name: (path.name, path.read_bytes()) for path in (made.config, made.tensors)}
        async with admin_client(plane.app, plane.make_key()) as client:
            answer = await client.post(f"{ADAPTER}/versions", files=files)
        assert answer.status_code == 422
        row = rows(plane)[-1]
        assert (row.action, row.outcome, row.code) == ("version.upload", "refused", answer.json()["code"])
        assert row.target == "tenants/acme/adapters/support/versions"

    async def test_another_tenants_key(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        plane.make_tenant("rival")
        async with admin_client(plane.app, plane.make_key("rival")) as client:
            assert (await client.delete(ADAPTER)).status_code == 404
        row = rows(plane, tenant="acme")[-1]
        assert (row.by.tenant_id, row.tenant_id, row.code) == ("rival", "acme", "tenant_not_found")

    async def test_our_own_failure(
        self, plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(plane.services.tenants, "update", fail)
        assert (await admin.patch("/tenants/acme", json={})).status_code == 500
        assert [(row.outcome, row.code) for row in rows(plane)] == [("failed", "internal_error")]

    async def test_unknown_caller_writes_no_row(self, plane: AdminPlane) -> None:
        async with admin_client(plane.app, "lpx_0123_wrong") as client:
            assert (await client.delete(ADAPTER)).status_code == 401
        assert rows(plane) == []

    async def test_a_secret_in_a_path_is_cut(self, plane: AdminPlane, admin: httpx.AsyncClient) -> None:
        plane.make_tenant()
        secret = plane.make_key()
        assert (await admin.delete(f"/tenants/acme/keys/{secret}")).status_code == 404
        for wrong in (secret, ADMIN_TOKEN, "x" * 250, "%7Btenant%7D", "a%20b"):
            assert (await admin.delete(f"/tenants/{wrong}/keys/{wrong}")).status_code == 404
        targets = [row.target for row in rows(plane)]
        key_id = secret.split("_")[1]
        assert f"tenants/acme/keys/lpx_{key_id}_***" in targets
        assert not [target for target in targets if secret in target or ADMIN_TOKEN in target]
        assert max(map(len, targets)) < 400
        assert f"tenants/{'x' * 80}/keys/{'x' * 80}" in targets

    async def test_an_answer_is_the_same_where_it_cannot_be_recorded(
        self, plane: AdminPlane, admin: httpx.AsyncClient
    ) -> None:
        with plane.database.write() as session:
            session.connection().exec_driver_sql("DROP TRIGGER audit_head_delete")
            session.connection().exec_driver_sql("DELETE FROM audit_head")
        assert (await admin.delete("/tenants/nobody")).status_code == 404
        answer = await admin.post("/tenants", json={"id": "new"})
        assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
        assert (await admin.get("/tenants/new")).status_code == 404


class TestReading:
    @pytest.fixture
    def plane(self, tmp_path: Path) -> Iterator[AdminPlane]:
        made = AdminPlane(tmp_path)
        made.make_tenant("acme", display_name="Acme Inc.")
        made.make_tenant("rival")
        made.make_key("acme")
        yield made
        made.close()

    async def test_rows_and_pages(self, admin: httpx.AsyncClient) -> None:
        page = (await admin.get("/audit?limit=2")).json()
        assert [row["seq"] for row in page["data"]] == [3, 2]
        rest = (await admin.get("/audit", params={"cursor": page["next_cursor"]})).json()
        assert [row["seq"] for row in rest["data"]] == [1]
        assert rest["next_cursor"] is None
        row = rest["data"][0]
        assert (row["actor"], row["action"], row["target"]) == ("local", "tenant.create", "tenants/acme")
        assert row["after"]["display_name"] == "Acme Inc."
        assert (row["before"], row["outcome"], row["code"]) == (None, "done", None)
        assert row["time"].endswith("Z")
        assert len(row["hash"]) == 64

    async def test_filters(self, admin: httpx.AsyncClient) -> None:
        async def seqs(**params: str) -> list[int]:
            return [row["seq"] for row in (await admin.get("/audit", params=params)).json()["data"]]

        assert await seqs(tenant="acme") == [3, 1]
        assert await seqs(action="key.create") == [3]
        assert await seqs(actor="local", outcome="done") == [3, 2, 1]
        assert await seqs(actor="admin") == []
        assert await seqs(start="2099-01-01T00:00:00Z") == []
        assert await seqs(end="2099-01-01T00:00:00Z") == [3, 2, 1]

    @pytest.mark.parametrize(
        "query",
        ["start=yesterday", "start=2030-01-01T00:00:00", "outcome=good", "limit=0", "colour=red", "tenant="],
    )
    async def test_wrong_filters_are_refused(self, admin: httpx.AsyncClient, query: str) -> None:
        assert (await admin.get(f"/audit?{query}")).status_code == 400

    async def test_a_deleted_tenants_texts_are_gone(self, admin: httpx.AsyncClient) -> None:
        would = (await admin.get("/tenants/acme/erasure")).json()
        told = (await admin.delete("/tenants/acme")).json()
        assert told == {"id": "acme", "deleted": True} | would
        assert would == {
            "erased": {
                "keys": 1,
                "adapters": 0,
                "versions": 0,
                "series": 0,
                "artifacts": 0,
                "artifact_bytes": 0,
                "files": 0,
                "file_bytes": 0,
                "batches": 0,
                "audit_texts": 1,
            },
            "kept": {"usage_since": None, "audit_rows": 3, "shared_artifacts": 0},
        }
        answer = await admin.get("/audit?tenant=acme")
        assert "Acme Inc." not in answer.text
        assert answer.json()["data"][-1]["after"]["display_name"] == {"erased": True}
        again = await admin.post("/tenants", json={"id": "acme"})
        assert (again.status_code, again.json()["code"]) == (409, "tenant_id_retired")


class TestChangeRateLimit:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def plane(self, tmp_path: Path, clock: FakeClock) -> Iterator[AdminPlane]:
        made = AdminPlane(tmp_path, change_limit=ChangeRateLimit(3, clock=clock))
        made.make_tenant("acme")
        made.make_tenant("rival")
        yield made
        made.close()

    async def test_a_tenant_that_changes_too_much_waits_and_nobody_else_does(
        self, plane: AdminPlane, clock: FakeClock, admin: httpx.AsyncClient
    ) -> None:
        path = f"{ADAPTER}/release/promote"
        async with (
            admin_client(plane.app, plane.make_key("acme")) as one,
            admin_client(plane.tenant_app, plane.make_key("acme")) as other,
            admin_client(plane.app, plane.make_key("rival")) as rival,
        ):
            other.base_url = httpx.URL("http://data")
            before = len(rows(plane))
            # Two keys of a tenant, on both ports; refused calls count.
            assert [(await client.post(path)).status_code for client in (one, other, one)] == [404] * 3
            refused = await other.post(path)
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limit_exceeded")
            assert refused.headers["retry-after"] == "20"
            assert refused.json()["detail"].endswith("things a minute. Please try again in 20s.")
            assert len(rows(plane)) == before + 3
            assert (await one.get(ADAPTER)).status_code == 404
            assert (await rival.post(path.replace("acme", "rival"))).status_code == 404
            assert [(await admin.post(path)).status_code for _ in range(5)] == [404] * 5
            clock.advance(20)
            assert [(await one.post(path)).status_code for _ in range(2)] == [404, 429]

    async def test_a_schedule_is_charged_its_steps(self, plane: AdminPlane, clock: FakeClock) -> None:
        steps = [{"weight": weight, "for_seconds": 1} for weight in (10, 20, 30)]
        body: dict[str, Any] = {"targets": [{"version": "v1", "weight": 1}, {"version": "v2", "weight": 1}]}
        async with admin_client(plane.app, plane.make_key("acme")) as one:
            whole = await one.put(f"{ADAPTER}/release", json=body | {"schedule": steps})
            assert (whole.status_code, whole.json()["code"]) == (429, "rate_limit_exceeded")
            clock.advance(60)
            some = await one.put(f"{ADAPTER}/release", json=body | {"schedule": steps[:2]})
            assert some.status_code == 404, "no such adapter: three changes were charged"
            assert (await one.put(f"{ADAPTER}/release", json=body)).status_code == 429


async def test_the_log_is_verified_over_http(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    plane.make_tenant()
    plane.make_tenant("rival")
    said = (await admin.get("/audit/verify")).json()
    assert said == {
        "whole": True,
        "rows": 2,
        "anchor": str(verify(plane.database).head),
        "broken_at": None,
        "reason": None,
    }
    assert (await admin.get("/audit/verify", params={"anchor": said["anchor"]})).json() == said
    rewritten = await admin.get("/audit/verify", params={"anchor": f"1:{'0' * 64}"})
    assert (rewritten.json()["whole"], rewritten.json()["broken_at"]) == (False, 1)
    for nonsense in ("1", "x:y", "1:" + "z" * 64):
        answer = await admin.get("/audit/verify", params={"anchor": nonsense})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_value")
    async with admin_client(plane.app, plane.make_key("acme", "usage:read")) as own:
        assert (await own.get("/audit/verify")).json()["code"] == "insufficient_scope"
        assert (await own.get("/tenants/acme")).json()["id"] == "acme"
        assert (await own.get("/tenants/rival")).json()["code"] == "tenant_not_found"
