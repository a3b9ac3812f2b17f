"""Bytes that rot on the disk of a running server: requests on them get an error, all others are served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.faults.damage import flip_a_bit
from support.servers.live_server import (
    ADAPTER_FILES,
    TINY_TORCH,
    LiveServer,
    checked,
    run_command,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow


def cut(folder: Path) -> None:
    path = folder / ADAPTER_FILES[1]
    os.truncate(path, path.stat().st_size - 1)


def lose_a_file(folder: Path) -> None:
    (folder / ADAPTER_FILES[0]).unlink()


HARM: dict[str, Callable[[Path], None]] = {
    "flipped": flip_a_bit,
    "cut": cut,
    "lost": lose_a_file,
    "gone": shutil.rmtree,
}


FILLERS = ("filler-0", "filler-1", "filler-2", "filler-3")


class Shop:
    """A server with tenants whose adapters share bytes."""

    def __init__(self, server: LiveServer, root: Path) -> None:
        self.server = server
        self.folders: dict[int, Path] = {}
        self._root = root
        for tenant in ("acme", "rival"):
            server.create_tenant(tenant)
        self.keys = {tenant: server.create_key(tenant) for tenant in ("acme", "rival")}

    def push(self, tenant: str, name: str, seed: int) -> dict[str, Any]:
        if seed not in self.folders:
            self.folders[seed] = write_tiny_adapter(self._root / f"seed-{seed}", seed=seed)
        return self.server.upload(tenant, name, self.folders[seed])

    def stored(self, version: dict[str, Any]) -> Path:
        digest = version["digest"]
        return self.server.data_dir / "artifacts" / "sha256" / digest[:2] / digest

    def ask(self, tenant: str, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "one", "max_tokens": 3, **fields}
        with self.server.client(self.keys[tenant]) as client:
            return client.post("/v1/completions", json=body)

    def state(self, tenant: str, name: str, version: str = "v1") -> str:
        return str(
            checked(self.server.admin.get(f"tenants/{tenant}/adapters/{name}/versions/{version}"))["state"]
        )

    def push_out(self) -> None:
        """Ask for other adapters until they alone are in memory: the check of an upload has loaded the rest."""

        def are_alone() -> bool:
            for name in FILLERS:
                assert self.ask("acme", name).status_code == 200
            in_memory = {name for name, tiers in self.server.residency().items() if tiers != ["disk"]}
            return in_memory == {f"{name}@v1" for name in FILLERS}

        self.server.wait(are_alone)

    def refusal(self, tenant: str, model: str) -> str:
        answer = self.ask(tenant, model)
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "adapter_unavailable"
        assert answer.headers["retry-after"]
        return str(answer.json()["error"]["message"])


@pytest.fixture
def shop(tiny_model: Path, tmp_path: Path) -> Iterator[Shop]:
    """The device holds four adapters and host memory one: see `Shop.push_out`. Each load reads the upload: from a
    laid-out copy an adapter is served whole, whatever became of its upload."""
    sizes = TINY_TORCH | {"adapter_memory": "1MiB", "adapter_cpu_memory": "256KiB"}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").touch()  # where the folder of the copies would be
    with LiveServer(tiny_model, tmp_path / "data", **sizes) as server:
        shop = Shop(server, tmp_path)
        assert server.engine()["info"]["arena_pages"] == len(FILLERS)
        for seed, name in enumerate(FILLERS, 1000):
            shop.push("acme", name, seed)
        yield shop


def test_damage_is_found_by_the_load_told_to_all_that_share_it_and_healed(shop: Shop) -> None:
    server = shop.server
    broken = {}
    for seed, name in enumerate(HARM):
        broken[name] = shop.push("acme", name, seed)
        shop.push("acme", f"{name}-too", seed)
        shop.push("rival", name, seed)
    shop.push("acme", "good", 100)
    shop.push("acme", "half", 101)
    half = shop.push("acme", "half", 0)
    assert half["version"] == "v2"
    targets = [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}]
    checked(
        server.admin.put("tenants/acme/adapters/half/release", json={"targets": targets, "sticky": "user"})
    )
    shop.push_out()
    for name, harm in HARM.items():
        harm(shop.stored(broken[name]))

    for name in HARM:
        assert ("holds no artifact" if name == "gone" else "is damaged") in shop.refusal("acme", name)
        for tenant, shared in (("acme", name), ("acme", f"{name}-too"), ("rival", name)):
            server.wait(lambda t=tenant, s=shared: shop.state(t, s) == "corrupt")  # type: ignore[misc]
            assert "is corrupt and cannot be served: its stored bytes are damaged or lost" in shop.refusal(
                tenant, shared
            )
    assert shop.ask("acme", "good").status_code == 200
    assert shop.state("acme", "good") == "ready"
    # A release keeps its shares: who falls to the damaged half is told, nobody is moved over.
    assert shop.state("acme", "half", "v2") == "corrupt"
    answers = {user: shop.ask("acme", "half", user=user) for user in (f"u{n}" for n in range(24))}
    assert {answer.status_code for answer in answers.values()} == {200, 503}
    again = {user: shop.ask("acme", "half", user=user).status_code for user in answers}
    assert again == {user: answer.status_code for user, answer in answers.items()}
    assert {a.headers["x-loraplex-adapter"] for a in answers.values() if a.status_code == 200} == {"half@v1"}

    shown = run_command(
        [
            *server.command[: server.command.index("serve")],
            "adapter",
            "show",
            "flipped@v1",
            "--tenant",
            "acme",
        ],
        environment={"LORAPLEX_ADMIN_URL": server.admin_url, "LORAPLEX_ADMIN_TOKEN": server.admin_token},
    )
    assert shown.code == 0
    assert "corrupt" in shown.stdout
    lines = server.logged("artifact_damaged")
    assert {line["digest"] for line in lines} == {row["digest"] for row in broken.values()}
    assert len(lines) == len(HARM)

    assert server.stop() == 0
    server.start()
    for name in HARM:
        assert shop.state("rival", name) == "corrupt"
    for seed, name in enumerate(HARM):
        assert shop.push("rival", "another", seed)["state"] == "ready"
        for tenant, shared in (("acme", name), ("acme", f"{name}-too"), ("rival", name)):
            assert shop.state(tenant, shared) == "ready"
            assert shop.ask(tenant, shared).status_code == 200
    assert {shop.ask("acme", "half", user=user).status_code for user in answers} == {200}


def test_a_pinned_version_is_found_damaged_without_a_request_and_pinned_again_when_healed(shop: Shop) -> None:
    server = shop.server
    version = shop.push("acme", "kept", 1)
    checked(server.admin.put("tenants/acme/adapters/kept/versions/v1/pin"))
    server.wait(lambda: server.residency()["kept@v1"][:1] == ["device"])
    assert server.stop() == 0
    flip_a_bit(shop.stored(version))
    server.start()
    server.wait(lambda: shop.state("acme", "kept") == "corrupt")
    server.wait(lambda: not server.stats()["num_leases"])
    shop.push("acme", "kept", 1)
    server.wait(lambda: server.residency()["kept@v1"][:1] == ["device"])
    assert shop.ask("acme", "kept").status_code == 200
