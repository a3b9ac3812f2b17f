"""The task that flushes pushed versions: how many may wait, what a failure does, and what a server's end leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.flushes import Flushes
from loraplex.lifecycle.durability import Durability
from support.adapters.drafts import make_adapter
from support.http.admin_plane import ARCH, AdminPlane, FakeDurabilityWatch

SIZE = 1000


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path)
    made.make_tenant("acme")
    yield made
    made.check_integrity()
    made.close()


def push(plane: AdminPlane, seed: int) -> str:
    """An early push's digest."""
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=seed)
        return plane.services.catalog.admit("acme", "run", staging, durable=False)[0].digest


def not_durable(plane: AdminPlane) -> list[str]:
    listed = plane.services.catalog.list_versions("acme", "run").items
    return [info.version for info in listed if not info.durable]


class FailingDisk:
    """Fails the first `times` flushes of files."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if step is FaultPoint.FLUSH_FILE and self.left:
            self.left -= 1
            raise OSError(5, os.strerror(5))


@contextlib.asynccontextmanager
async def running(durability: Durability) -> AsyncIterator[None]:
    task = asyncio.create_task(durability.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until_empty(durability: Durability) -> None:
    async with asyncio.timeout(30):
        while durability.num_waiting:
            await asyncio.sleep(0.005)


async def test_pushes_of_any_thread_become_durable(plane: AdminPlane) -> None:
    push(plane, 1)  # of an earlier life: nobody has put it
    async with running(plane.durability):
        digests = [await asyncio.to_thread(push, plane, seed) for seed in range(2, 22)]
        for digest in digests:
            await asyncio.to_thread(plane.durability.put, digest, SIZE)
        async with asyncio.timeout(30):
            while not_durable(plane):
                await asyncio.sleep(0.005)
        await until_empty(plane.durability)
    assert len(plane.watch.waits) == 21


async def test_a_push_beyond_the_bounds_has_no_place(plane: AdminPlane) -> None:
    watch = FakeDurabilityWatch()
    durability = Durability(plane.database, plane.flushes, watch, max_waiting=2, max_waiting_bytes=3 * SIZE)
    with durability.place(SIZE) as first, durability.place(SIZE) as second, durability.place(SIZE) as third:
        assert [place.is_free for place in (first, second, third)] == [True, True, False]
    with durability.place(3 * SIZE + 1) as large:
        assert not large.is_free
    with durability.place(2 * SIZE) as place:
        place.put(push(plane, 1))
    with durability.place(2 * SIZE) as large, durability.place(SIZE) as small:
        assert (large.is_free, small.is_free) == (False, True)
    await durability.finish()
    with durability.place(3 * SIZE) as place:
        assert place.is_free


async def test_a_disk_that_fails_is_tried_again_and_keeps_nothing_else_waiting(plane: AdminPlane) -> None:
    for seed in (1, 2):
        plane.durability.put(push(plane, seed), SIZE)
    plane.store.fault = FailingDisk(3)
    async with running(plane.durability):
        await until_empty(plane.durability)
    assert plane.watch.num_failures == 3
    assert not_durable(plane) == []


async def test_a_push_does_not_wait_for_the_pause_of_another(plane: AdminPlane) -> None:
    watch = FakeDurabilityWatch()
    flushes = Flushes(plane.database, plane.store)
    durability = Durability(plane.database, flushes, watch, first_pause_s=1000.0)
    bad = push(plane, 1)
    plane.store.fault = fails = FailingDisk(1)
    async with running(durability):
        durability.put(bad, SIZE)
        async with asyncio.timeout(30):
            while not watch.num_failures:
                await asyncio.sleep(0.005)
        assert not fails.left
        durability.put(push(plane, 2), SIZE)
        await until_empty(durability)
    assert not_durable(plane) == []


async def test_the_end_of_a_server_flushes_what_waits_and_leaves_the_rest_to_the_next(
    plane: AdminPlane,
) -> None:
    for seed in range(1, 20):
        plane.durability.put(push(plane, seed), SIZE)
    await plane.durability.finish()
    assert not_durable(plane) == []
    plane.durability.put(push(plane, 20), SIZE)
    plane.store.fault = FailingDisk(1)
    await plane.durability.finish()
    assert not_durable(plane) == ["v20"]
    plane.start()
    assert not_durable(plane) == []


async def test_bytes_that_are_put_again_while_they_are_flushed_are_flushed_once_more(
    plane: AdminPlane,
) -> None:
    """The flush that ran may have been of the bytes before."""
    digest = push(plane, 1)
    plane.durability.put(digest, SIZE)

    def put_again(step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if step is FaultPoint.FLUSH_SHELF:
            plane.store.fault = FailingDisk(0)
            plane.durability.put(digest, SIZE)

    plane.store.fault = put_again
    await plane.durability.finish()
    assert plane.durability.num_waiting == 0
    assert len(plane.watch.waits) == 1  # the second found nothing to do
