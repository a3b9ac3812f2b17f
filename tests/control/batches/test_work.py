"""Parts are held by lease, results are written once, and batches end as they should, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from loraplex.control.batches.batches import Batches, BatchInfo
from loraplex.control.batches.files import FILE_DAYS, Files
from loraplex.control.batches.work import BatchWork, Result, Work
from loraplex.control.db.batch_tables import Batch, BatchPart, BatchResult, StoredFile
from loraplex.control.db.database import utc_now
from loraplex.control.errors import BatchNotFound, FileNotFound
from support.control.batches import make_batch, request_line, written
from support.control.plane import ControlPlane


def batch_of(plane: ControlPlane, count: int, tenant: str = "acme") -> BatchInfo:
    return make_batch(plane.database, (request_line(number) for number in range(count)), tenant)


def workers(plane: ControlPlane) -> tuple[BatchWork, BatchWork]:
    return BatchWork(plane.database, "one"), BatchWork(plane.database, "two")


def taken(worker: BatchWork, **held: int) -> Work:
    work = worker.take(held, 3)
    assert work is not None
    return work


def answers(work: Work, word: bytes = b"x") -> list[Result]:
    return [Result(line.number, False, word + b"\n") for line in work.lines]


def end_leases(plane: ControlPlane) -> None:
    with plane.database.write() as session:
        session.execute(update(BatchPart).values(until=utc_now() - timedelta(seconds=1)))


def expire(plane: ControlPlane) -> None:
    with plane.database.write() as session:
        session.execute(update(Batch).values(expires_at=utc_now() - timedelta(seconds=1)))


def test_each_part_has_one_holder(plane: ControlPlane) -> None:
    batch_of(plane, 150)
    one, two = workers(plane)
    parts = [taken(one), taken(two), taken(one)]
    assert [part.number for part in parts] == [0, 1, 2]
    assert [len(part.lines) for part in parts] == [64, 64, 22]
    assert two.take({}, 3) is None
    assert one.renew(parts) == {parts[0].key, parts[2].key}


def test_a_dead_servers_part_is_taken_with_the_lines_that_are_left(plane: ControlPlane) -> None:
    made = batch_of(plane, 10)
    one, two = workers(plane)
    dead = taken(one)
    assert one.write(dead, answers(dead)[:4]) == 4
    end_leases(plane)
    rest = taken(two)
    assert [line.number for line in rest.lines] == [5, 6, 7, 8, 9, 10]
    assert one.renew([dead]) == set()
    assert two.write(rest, answers(rest, b"two")) == 6
    assert one.write(dead, answers(dead, b"late")) == 0, "each result is written once"
    one.release(dead, done=False)  # of a part that it does not hold any more
    two.release(rest, done=True)
    assert two.settle() == [(made.id, "completed")]
    done = Batches(plane.database).get("acme", made.id)
    assert (done.total, done.completed, done.failed) == (10, 10, 0)
    files = Files(plane.database)
    assert b"".join(files.content(files.get("acme", done.output_file_id or ""))) == b"x\n" * 4 + b"two\n" * 6


def test_what_is_refused_for_now_is_taken_again_later(plane: ControlPlane) -> None:
    batch_of(plane, 3)
    one, two = workers(plane)
    work = taken(one)
    one.release(work, done=False, again_s=60.0)
    assert two.take({}, 3) is None
    end_leases(plane)
    assert taken(two).takes == 2


def test_a_suspended_tenants_parts_wait_for_its_return(plane: ControlPlane) -> None:
    """Or for the end of their batch's time; nobody else's wait."""
    batch_of(plane, 3)
    batch_of(plane, 3, "rival")
    one, _ = workers(plane)
    plane.tenants.update("acme", {"suspended": True})
    assert taken(one).tenant_id == "rival"
    assert one.take({}, 3) is None
    assert one.settle() == []
    plane.tenants.update("acme", {"suspended": False})
    work = taken(one)
    assert (work.tenant_id, len(work.lines), work.takes) == ("acme", 3, 1)
    one.release(work, done=False)
    plane.tenants.update("acme", {"suspended": True})
    expire(plane)
    assert taken(one).expired


def test_the_tenant_with_the_fewest_parts_is_next(plane: ControlPlane) -> None:
    batch_of(plane, 400)
    batch_of(plane, 10, "rival")
    one, _ = workers(plane)
    assert taken(one, acme=2).tenant_id == "rival"
    assert taken(one, acme=2, rival=1).tenant_id == "acme"
    assert one.take({"acme": 3}, 3) is None


def test_cancelling_keeps_what_is_done(plane: ControlPlane) -> None:
    made = batch_of(plane, 100)
    batches, (one, _) = Batches(plane.database), workers(plane)
    work = taken(one)
    one.write(work, answers(work)[:5])
    with pytest.raises(BatchNotFound):
        batches.cancel("rival", made.id)
    assert batches.cancel("acme", made.id).status == "cancelling"
    assert one.renew([work]) == set()
    assert one.settle() == [], "its holder may still write"
    one.write(work, answers(work)[5:6])
    one.release(work, done=False)
    assert one.settle() == [(made.id, "cancelled")]
    done = batches.cancel("acme", made.id)
    assert (done.status, done.completed) == ("cancelled", 6)
    assert one.write(work, answers(work)) == 0
    with plane.database.read() as session:
        assert session.scalar(select(func.count()).select_from(BatchResult)) == 6


def test_a_batch_expires_with_its_window(plane: ControlPlane) -> None:
    made = batch_of(plane, 100)
    one, _ = workers(plane)
    work = taken(one)
    expire(plane)
    assert one.renew([work]) == set()
    one.release(work, done=False)
    for _ in range(2):
        work = taken(one)
        assert work.expired
        one.write(work, [Result(line.number, True, b"late\n") for line in work.lines])
        one.release(work, done=True)
    assert one.settle() == [(made.id, "expired")]
    done = Batches(plane.database).get("acme", made.id)
    assert (done.failed, done.output_file_id) == (100, None)


def test_a_batch_whose_file_is_deleted_fails(plane: ControlPlane) -> None:
    made = batch_of(plane, 100)
    files, (one, _) = Files(plane.database), workers(plane)
    work = taken(one)
    one.write(work, answers(work))
    files.delete("acme", made.input_file_id)
    assert one.take({}, 3) is None
    done = Batches(plane.database).get("acme", made.id)
    assert (done.status, done.completed) == ("failed", 64)
    assert "deleted" in (done.error or "")
    assert done.output_file_id is not None


def test_queued_tokens_are_limited(plane: ControlPlane) -> None:
    lines = [request_line(number) for number in range(10)]
    tokens = -(-sum(map(len, lines)) // 4)
    plane.tenants.update("acme", {"limits": {"batch_tokens": tokens}})
    assert make_batch(plane.database, lines).status == "in_progress"
    refused = make_batch(plane.database, lines)
    assert refused.status == "failed"
    assert "batch_tokens" in (refused.error or "")
    assert make_batch(plane.database, lines, "rival").status == "in_progress"


def test_results_go_with_their_file_tenant_and_time(plane: ControlPlane) -> None:
    kept, (one, _) = batch_of(plane, 3, "rival"), workers(plane)
    batch_of(plane, 3)
    for _ in range(2):
        work = taken(one)
        one.write(work, answers(work))
        one.release(work, done=True)
    one.settle()

    def left() -> int:
        with plane.database.read() as session:
            return session.scalar(select(func.count()).select_from(BatchResult)) or 0

    assert left() == 6
    plane.tenants.delete("acme")
    assert left() == 3
    files, done = Files(plane.database), Batches(plane.database).get("rival", kept.id)
    with pytest.raises(FileNotFound):
        files.get("acme", done.output_file_id or "")
    files.delete("rival", done.output_file_id or "")
    assert left() == 0
    with plane.database.write() as session:
        session.execute(update(Batch).values(ended_at=utc_now() - timedelta(days=FILE_DAYS, seconds=1)))
    files.remove_expired()
    with plane.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Batch)) == 0
        assert session.scalar(select(func.count()).select_from(StoredFile)) == 1


def test_an_output_file_is_as_large_as_it_says(plane: ControlPlane) -> None:
    made, (one, _) = batch_of(plane, 3), workers(plane)
    work = taken(one)
    one.write(work, answers(work, "ü".encode()))
    one.release(work, done=True)
    one.settle()
    done = Batches(plane.database).get("acme", made.id)
    files = Files(plane.database)
    file = files.get("acme", done.output_file_id or "")
    assert (file.bytes, file.requests, file.purpose) == (9, 3, "batch_output")
    assert written(plane.database, "acme", done.error_file_id) == []


def test_a_tenant_s_files_and_batches_are_kept_for_its_days(plane: ControlPlane) -> None:
    files, (one, _) = Files(plane.database), workers(plane)
    plane.tenants.update("acme", {"limits": {"file_days": 2}})
    for tenant in ("acme", "rival"):
        batch_of(plane, 3, tenant)
    for _ in range(2):
        work = taken(one)
        one.write(work, answers(work))
        one.release(work, done=True)
    one.settle()
    with plane.database.write() as session:
        kept = [
            (row.tenant_id, row.expires_at - row.created_at) for row in session.scalars(select(StoredFile))
        ]
        session.execute(update(Batch).values(ended_at=utc_now() - timedelta(days=3)))
    assert sorted(kept) == [("acme", timedelta(days=2))] * 2 + [("rival", timedelta(days=FILE_DAYS))] * 2
    files.remove_expired()
    with plane.database.read() as session:
        assert session.scalars(select(Batch.tenant_id)).all() == ["rival"]
    plane.tenants.update("acme", {"limits": {"file_days": 1 << 50}})
    assert batch_of(plane, 3).status == "in_progress", "an age in days is a time too"


def test_a_server_without_work_writes_nothing(plane: ControlPlane) -> None:
    """Not even a lock is taken, for which others would wait."""
    made, (one, two) = batch_of(plane, 3), workers(plane)
    work = taken(one)
    with plane.database.write() as session, ThreadPoolExecutor(1) as thread:
        session.execute(update(Batch).values(labels={"a": "b"}))
        assert thread.submit(two.settle).result(5) == []
        assert thread.submit(two.take, {}, 3).result(5) is None
    one.write(work, answers(work))
    one.release(work, done=True)
    assert two.settle() == [(made.id, "completed")]
