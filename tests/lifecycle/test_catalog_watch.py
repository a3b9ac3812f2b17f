"""Pins and deletions that one server takes, on the engine of another one with the same database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import structlog

from loraplex.adapters.ref import AdapterRef
from loraplex.control.types import VersionInfo
from loraplex.engine.kv.prefix_keys import MAX_OWNERS
from loraplex.engine.types import Namespace
from loraplex.lifecycle.catalog_watch import ERASE_S, INTERVAL_S, CatalogWatch
from loraplex.serving.errors import ServingError
from support.control.plane import use_database
from support.engine.fake_engine import FakeEngineClient
from support.http.admin_plane import AdminPlane, admin_client
from support.http.quiet import all_levels
from support.servers.postgres import need_programs, postgres_server

VERSION = "/tenants/acme/adapters/support/versions/v1"


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def planes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[AdminPlane, AdminPlane]]:
    if getattr(request, "param", "sqlite") == "postgresql":
        need_programs()
        use_database(tmp_path, postgres_server().clear())
    first, second = AdminPlane(tmp_path), AdminPlane(tmp_path)
    first.make_tenant()
    first.make_adapter()
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def http(planes: tuple[AdminPlane, AdminPlane]) -> AsyncIterator[httpx.AsyncClient]:
    """The first server, which takes the changes."""
    async with admin_client(planes[0].app) as client:
        yield client


@pytest.fixture
async def other(planes: tuple[AdminPlane, AdminPlane], clock: Clock) -> AsyncIterator[FakeEngineClient]:
    """The second server's engine, while that server watches the catalog."""
    plane = planes[1]
    watch = CatalogWatch(plane.database, plane.services.catalog, plane.services.tenants, clock=clock)
    task = asyncio.create_task(watch.run(plane.engine, interval_s=0.005))
    await until(lambda: plane.engine.owners_asked == [None])
    yield plane.engine
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


on_each_database = pytest.mark.parametrize(
    "planes", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():
            await asyncio.sleep(0.002)


@on_each_database
async def test_a_pin_comes_and_goes_on_the_other_server(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient
) -> None:
    ref = planes[0].services.catalog.get_version("acme", "support", "v1").ref()
    assert (await http.put(f"{VERSION}/pin")).status_code == 200
    await until(lambda: other.pins == {ref.digest: ref})
    assert "acme" in other.terms, "its tenant's limits of memory come before it"
    assert (await http.delete(f"{VERSION}/pin")).status_code == 200
    await until(lambda: not other.pins)
    assert 2 * INTERVAL_S < 5, "a change is in force within five seconds"


@on_each_database
async def test_what_is_deleted_leaves_the_other_servers_engine(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient
) -> None:
    """Bytes that another tenant has too stay."""
    planes[0].make_tenant("rival")
    planes[0].make_adapter("parrot", "rival", seed=2)
    planes[0].make_adapter("shared", seed=2)
    catalog = planes[0].services.catalog
    gone = catalog.get_version("acme", "support", "v1").digest
    kept = catalog.get_version("acme", "shared", "v1").digest
    other.states = {gone: "warm", kept: "hot"}
    assert (await http.put(f"{VERSION}/pin")).status_code == 200
    await until(lambda: gone in other.pins)
    assert (await http.delete("/tenants/acme/adapters/shared")).status_code == 204
    assert (await http.delete("/tenants/acme/adapters/support")).status_code == 204
    await until(lambda: gone in other.drops and not other.pins)
    assert other.resident == {kept: "hot"}


async def test_what_an_engine_brings_that_was_deleted_while_it_was_away_leaves(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient
) -> None:
    ref = planes[0].services.catalog.get_version("acme", "support", "v1").ref()
    assert (await http.delete("/tenants/acme/adapters/support")).status_code == 204
    await until(lambda: ref.digest in planes[0].engine.drops)
    other.states["kept elsewhere"] = "hot"
    await until(lambda: "kept elsewhere" in other.drops)  # a round has seen the deletion
    other.states[ref.digest] = "warm"
    await until(lambda: ref.digest in other.drops)


async def test_prefixes_of_deleted_owners_are_erased_where_an_engine_was_away(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient, clock: Clock
) -> None:
    """Also those of tenants that no server of this process has seen; what is of others stays."""
    planes[0].make_tenant("leaves")
    kept = planes[0].services.catalog.get_version("acme", "support", "v1").digest
    assert (await http.delete("/tenants/leaves")).status_code == 200
    other.owners = {("leaves", None), ("acme", None), ("acme", kept), ("acme", "f" * 64)}
    clock.seconds += ERASE_S
    await until(lambda: other.owners == {("acme", None), ("acme", kept)})


async def test_owners_are_looked_up_in_parts_that_an_answer_holds(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient, clock: Clock
) -> None:
    planes[0].make_tenant("zoe")
    assert (await http.delete("/tenants/zoe")).status_code == 200
    many = {(f"{number:05}".ljust(64, "x"), None) for number in range(2 * MAX_OWNERS)}
    other.owners = {*many, ("zoe", None)}
    for part in range(2, 5):
        assert ("zoe", None) in other.owners
        clock.seconds += ERASE_S
        await until(lambda part=part: len(other.owners_asked) == part)
    await until(lambda: other.owners == many)
    clock.seconds += ERASE_S
    await until(lambda: len(other.owners_asked) == 5)
    assert other.owners_asked[1:] == [None, sorted(many)[MAX_OWNERS - 1], max(many), None]


async def test_what_cannot_be_erased_keeps_no_pin_waiting_and_is_tried_once_a_minute(
    http: httpx.AsyncClient, other: FakeEngineClient, clock: Clock
) -> None:
    asked = 0

    async def refuse(after: Namespace | None) -> set[Namespace]:
        nonlocal asked
        asked += 1
        raise ServingError("no answer")

    other.prefix_owners = refuse  # type: ignore[method-assign]
    with all_levels(), structlog.testing.capture_logs() as lines:
        clock.seconds += ERASE_S
        await until(lambda: asked == 1)
        assert (await http.put(f"{VERSION}/pin")).status_code == 200
        await until(lambda: bool(other.pins))
        assert asked == 1
        clock.seconds += ERASE_S
        await until(lambda: asked == 2)
    told = [line for line in lines if line["event"] == "prefixes_not_erased"]
    assert [line["log_level"] for line in told] == ["warning"] * asked
    assert all("deleted owners may stay" in line["reason"] and "no answer" in line["reason"] for line in told)


async def test_a_version_that_is_uploaded_again_meanwhile_is_not_dropped(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient, clock: Clock
) -> None:
    seeds = {seed: f"adapter-{seed}" for seed in (11, 12)}
    digests = {}
    for seed, name in seeds.items():
        planes[0].make_adapter(name, seed=seed)
        digests[planes[0].services.catalog.get_version("acme", name, "v1").digest] = seed
        assert (await http.delete(f"/tenants/acme/adapters/{name}")).status_code == 204
    dropped: list[str] = []

    async def upload_the_other(digest: str) -> None:
        if not dropped:
            (seed,) = {*digests.values()} - {digests[digest]}
            planes[0].make_adapter("again", seed=seed)
        dropped.append(digest)
        other.owners = {owner for owner in other.owners if owner[1] != digest}

    other.owners = {("acme", digest) for digest in digests}
    other.drop = upload_the_other  # type: ignore[method-assign]
    for number in (2, 3, 4):  # the round before has ended then
        clock.seconds += ERASE_S
        await until(lambda number=number: len(other.owners_asked) == number)
    assert len(dropped) == 1
    assert planes[0].services.catalog.get_version("acme", "again", "v1").digest not in dropped


async def test_a_refused_pin_is_tried_again_later(
    planes: tuple[AdminPlane, AdminPlane], http: httpx.AsyncClient, other: FakeEngineClient, clock: Clock
) -> None:
    asked: list[AdapterRef] = []
    take = other.pin

    async def refuse(ref: AdapterRef) -> None:
        asked.append(ref)
        raise ServingError("no memory for it")

    other.pin = refuse  # type: ignore[method-assign]
    assert (await http.put(f"{VERSION}/pin")).status_code == 200
    await until(lambda: bool(asked))
    planes[0].make_adapter("another", seed=3)  # the log has a row more, and a round to do
    await asyncio.sleep(0.1)
    assert len(asked) == 1
    other.pin = take  # type: ignore[method-assign]
    clock.seconds += 61
    await until(lambda: bool(other.pins))


async def test_a_pin_that_this_server_is_about_to_record_stays(
    planes: tuple[AdminPlane, AdminPlane], other: FakeEngineClient
) -> None:
    """A route pins in the engine first, and then in the database; a round comes between the two."""
    catalog, reads, unpinned = planes[1].services.catalog, 0, []
    pinned, unpin = catalog.pinned, other.unpin

    def read() -> list[VersionInfo]:
        nonlocal reads
        found, reads = pinned(), reads + 1
        if reads == 1:
            catalog.set_pin("acme", "support", "v1", True)
        return found

    async def note(digest: str) -> None:
        unpinned.append(digest)
        await unpin(digest)

    catalog.pinned = read  # type: ignore[method-assign]
    other.unpin = note  # type: ignore[method-assign]
    ref = catalog.get_version("acme", "support", "v1").ref()
    await other.pin(ref)
    planes[0].make_adapter("another", seed=3)
    await until(lambda: reads > 1)
    assert (other.pins, unpinned) == ({ref.digest: ref}, [])
