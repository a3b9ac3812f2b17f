"""What a whole server gives the guard of a release: an outcome of each request that the release sent to an arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loraplex.control.usage.outcome import Outcome, key_hash
from loraplex.control.usage.outcome_inbox import read_outcomes
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer, whole_server

USERS = [f"user-{number}" for number in range(12)]
PLAN = {
    "targets": [{"version": "v1", "weight": 1}, {"version": "v2", "weight": 1}],
    "sticky": "user",
    "guard": {"metrics": [{"name": "ttft"}]},
}


def ask(server: WholeServer, key: str, **fields: Any) -> str:
    """The version that answered."""
    body = {"model": "support", "prompt": "xyz", **fields}
    answer = server.http.post(f"{server.data_url}/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-loraplex-adapter"]


def outcomes(server: WholeServer) -> list[Outcome]:
    server.settle()
    while server.installation.usage_writer.write_some():
        pass
    with server.plane.database.read() as session:
        return list(read_outcomes(session, "acme", "support", 100).values())


def test_each_request_of_a_guarded_release_is_told_once_by_its_users_key(tmp_path: Path) -> None:
    with whole_server(tmp_path) as server:
        plane = server.plane
        plane.make_tenant("acme")
        for seed in (1, 2):
            plane.make_adapter(seed=seed)
        key = plane.make_key("acme", "inference")
        ask(server, key, user=USERS[0])
        assert outcomes(server) == []
        release = f"{server.admin_url}/admin/v1/tenants/acme/adapters/support/release"
        put = server.http.put(release, json=PLAN, headers=bearer(ADMIN_TOKEN))
        assert put.status_code == 200, put.text
        versions = {user: ask(server, key, user=user, stream=user < "user-5") for user in USERS}
        ask(server, key, model="support@v2", user=USERS[0])
        found = outcomes(server)
        assert {(outcome.key_hash, f"support@v{outcome.version}") for outcome in found} == {
            (key_hash(user), version) for user, version in versions.items()
        }
        assert len(found) == len(USERS)
        assert all(outcome.failed is False and outcome.first_token_s is not None for outcome in found)
