"""The usage journal: what was promised is there, whatever ends the server; nothing is promised without room."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from loraplex.control.usage import journal as journal_module
from loraplex.control.usage.journal import JournalFull, UsageJournal, leftovers, lock_life
from loraplex.control.usage.records import MAX_RECORD_BYTES, Ended, Record, decode_all, encode
from loraplex.control.usage.segments import (
    READ_BYTES,
    Position,
    Segment,
    read_records,
    segment_numbers,
    segment_path,
)
from support.control.usage import AT, accepted, ended
from support.servers.live_server import importable_tests
from support.waiting import eventually

SMALL = 64 << 10


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    made = UsageJournal(tmp_path, segment_bytes=SMALL)
    yield made
    made.close()


def read_all(directory: Path, upto: Position | None = None) -> list[Record]:
    found: list[Record] = []
    position: Position | None = Position(0, 0)
    while position is not None:
        records, position = read_records(directory, position, upto)
        found += records
    return found


async def serve(journal: UsageJournal, count: int) -> list[Ended]:
    """`count` requests at a time, to their ends."""
    requests = [accepted() for _ in range(count)]
    for request in requests:
        journal.accept(request)
    rows = [ended(request) for request in requests]
    await asyncio.gather(*map(journal.end, rows))
    return rows


async def test_ended_requests_are_on_the_disk_in_order(journal: UsageJournal) -> None:
    """Over several segments, which take more records than one of them holds."""
    rows = []
    for _ in range(24):
        rows += await serve(journal, 25)
    assert [r for r in read_all(journal.directory, journal.synced) if isinstance(r, Ended)] == rows
    assert len(segment_numbers(journal.directory)) > 2
    assert journal.num_ended == 600


async def test_many_ends_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that come while one goes on share the next."""
    syncs = 0
    sync, all_came = Segment.sync, threading.Event()

    def slow_sync(segment: Segment) -> None:
        nonlocal syncs
        syncs += 1
        assert all_came.wait(60)
        sync(segment)

    monkeypatch.setattr(Segment, "sync", slow_sync)
    journal = UsageJournal(tmp_path)
    serving = asyncio.create_task(serve(journal, 200))
    while journal.num_open or not syncs:
        await asyncio.sleep(0)
    all_came.set()
    await serving
    journal.close()
    assert syncs <= 2


WHOLE = [accepted(id="a"), ended(accepted(id="a")), ended(accepted(id="b"))]
BYTES = b"".join(map(encode, WHOLE))
ENDS = [len(b"".join(map(encode, WHOLE[:count]))) for count in range(4)]


@given(st.integers(0, len(BYTES)), st.binary(max_size=40))
def test_a_torn_tail_takes_nothing_before_it(cut: int, behind: bytes) -> None:
    data = BYTES[:cut] + b"\0" * 8 + behind
    found = [record for record, _, _ in decode_all(data)]
    assert found == WHOLE[: len(found)]
    # A record may lack nothing but zeros at its end: then it is whole.
    assert ENDS[len(found)] <= len(BYTES[:cut]) + 8
    assert len(found) >= max(count for count in range(4) if ENDS[count] <= cut)


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_damaged_byte_costs_its_own_record_and_is_never_believed(place: int, change: int) -> None:
    data = bytearray(BYTES)
    data[place] ^= change
    damaged = next(number for number in range(3) if place < ENDS[number + 1])
    found = [record for record, _, _ in decode_all(bytes(data))]
    assert found == WHOLE[:damaged] + WHOLE[damaged + 1 :]


@pytest.mark.parametrize("damage", [bytes(READ_BYTES * 2), b"\1\1\0\0" * (READ_BYTES // 2), b"\xff" * 77])
def test_records_behind_damage_are_read_and_the_damage_is_reported(damage: bytes, tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    # The records behind lie across the places where one reading ends and the next begins, too.
    for shift in (0, 1, 300):
        path.write_bytes(BYTES + damage + b"\xff" * shift + BYTES + bytes(1000))
        with structlog.testing.capture_logs() as logs:
            assert read_all(tmp_path) == WHOLE * 2
        (told,) = (entry for entry in logs if entry["event"] == "usage_journal_damaged")
        assert told["offset"] == len(BYTES)
        assert told["lost_bytes"] == len(damage) + shift
        assert told["file"] == str(path)
    path.write_bytes(BYTES + b"torn" + bytes(1000))
    with structlog.testing.capture_logs() as logs:
        assert read_all(tmp_path) == WHOLE
    assert not logs


async def test_a_torn_segment_hides_none_behind_it(journal: UsageJournal) -> None:
    rows = [row for _ in range(16) for row in await serve(journal, 25)]
    first = segment_path(journal.directory, 1)
    whole = len([r for r in read_all(journal.directory) if isinstance(r, Ended)])
    os.truncate(first, 100)
    left = [r for r in read_all(journal.directory) if isinstance(r, Ended)]
    assert whole == len(rows)
    assert 0 < len(left) < whole
    assert left == rows[-len(left) :]


async def test_a_full_journal_takes_no_more_and_keeps_what_it_owes(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, segment_bytes=SMALL, capacity=3 * SMALL)
    open_requests, rows = [], []
    with pytest.raises(JournalFull) as refused:
        while True:
            open_requests.append(accepted())
            journal.accept(open_requests[-1])
            if len(open_requests) > 20:
                rows.append(ended(open_requests.pop(0)))
                await journal.end(rows[-1])
    assert refused.value.retry_after_s
    open_requests.pop()
    assert journal.full
    assert journal.num_bytes <= 3 * SMALL
    for request in open_requests:
        rows.append(ended(request))
        await journal.end(rows[-1])
    assert [r for r in read_all(journal.directory) if isinstance(r, Ended)] == rows
    journal.release(journal.synced)
    eventually(lambda: not journal.full)
    await serve(journal, 10)
    journal.close()


async def test_a_disk_that_is_full_is_told_before_a_request_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for the ends of what runs was taken before."""
    journal = UsageJournal(tmp_path, segment_bytes=SMALL)
    eventually(lambda: journal._spare is not None)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "Segment", no_room)
        rows = []
        with pytest.raises(JournalFull):
            while True:
                rows += await serve(journal, 10)
        assert [r for r in read_all(journal.directory, journal.synced) if isinstance(r, Ended)] == rows
    eventually(lambda: not journal.full)
    await serve(journal, 10)
    journal.close()


async def test_a_sync_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = UsageJournal(tmp_path, segment_bytes=SMALL)
    rows = await serve(journal, 5)
    sync, failures = Segment.sync, [1, 1]

    def fail_twice(segment: Segment) -> None:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error")
        sync(segment)

    monkeypatch.setattr(Segment, "sync", fail_twice)
    rows += await serve(journal, 5)
    rows += await serve(journal, 5)
    found = [r for r in read_all(journal.directory, journal.synced) if isinstance(r, Ended)]
    assert list(dict.fromkeys(r.id for r in found)) == [r.id for r in rows]
    journal.close()


async def test_a_bug_in_the_thread_refuses_requests_until_it_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a system that lacks a call: the thread lives on, nothing is lost, and no caller waits without end."""
    journal = UsageJournal(tmp_path, segment_bytes=SMALL)
    first, second = accepted(), accepted()
    journal.accept(first)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.delattr(os, "fdatasync")
        ending = asyncio.create_task(journal.end(ended(first)))
        while journal.failure() is None or journal.state.up:
            await asyncio.sleep(0.002)
        assert "fdatasync" in str(journal.failure())
        assert (journal.full, journal.state.up) == (True, False)
        with pytest.raises(JournalFull):
            journal.accept(second)
        while journal.state.restarts < 2:
            await asyncio.sleep(0.002)
    failed = [entry for entry in logs if entry["event"] == "usage_journal_failed"]
    assert len(failed) == 1, "told once, however often it is tried"
    assert failed[0]["log_level"] == "error"
    assert isinstance(failed[0]["exc_info"], AttributeError)
    await ending
    eventually(lambda: journal.failure() is None)
    assert journal.state.up
    assert segment_numbers(journal.directory)[-1] <= 2  # it tried again in the same place
    journal.accept(second)
    await journal.end(ended(second))
    found = [record.id for record in read_all(journal.directory, journal.synced) if isinstance(record, Ended)]
    assert found == [first.id, second.id]
    journal.close()


async def test_a_disk_without_room_is_tried_and_told_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests end meanwhile: each try may write all that is left of the disk."""
    tries = 0

    class NoRoom:
        def __init__(self, *_: object) -> None:
            nonlocal tries
            tries += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        journal = UsageJournal(tmp_path)
        eventually(lambda: journal._spare is not None)
        patch.setattr(journal_module, "Segment", NoRoom)
        with journal._lock:
            journal._turn()  # as if the segment were full: now another spare is wanted
        began = time.monotonic()
        for _ in range(50):
            await serve(journal, 1)
        eventually(lambda: tries >= 2)
        assert tries <= 2 + (time.monotonic() - began) / journal_module.RETRY_S
    eventually(lambda: journal._spare is not None)
    assert [entry["event"] for entry in logs] == ["usage_journal_no_room"]
    journal.close()


async def test_a_thread_that_ends_all_the_same_takes_no_requests_and_holds_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC_WAIT_S", 3600)
    journal = UsageJournal(tmp_path, segment_bytes=SMALL)
    first, second = accepted(), accepted()
    journal.accept(first)
    journal.accept(second)

    def end_the_thread(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(Segment, "append", end_the_thread)
        ending = asyncio.create_task(journal.end(ended(first)))
        async with asyncio.timeout(60):
            await ending  # it waited when the thread ended
            await journal.end(ended(second))  # it came later
    assert [entry["event"] for entry in logs] == ["usage_journal_failed"]
    assert "its thread ended" in str(journal.failure())
    with pytest.raises(JournalFull):
        journal.accept(accepted())
    journal.close()


async def test_hanging_disk_delays_an_answer_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC_WAIT_S", 0.05)
    journal = UsageJournal(tmp_path)
    sync, answered = Segment.sync, threading.Event()

    def hang(segment: Segment) -> None:
        assert answered.wait(60), "the answer waits for the disk"
        sync(segment)

    monkeypatch.setattr(Segment, "sync", hang)
    async with asyncio.timeout(30):
        rows = await serve(journal, 1)
    answered.set()
    journal.close()
    assert read_all(journal.directory)[-1] == rows[0]


async def test_running_requests_outlive_their_segment(journal: UsageJournal) -> None:
    long = accepted()
    journal.accept(long)
    while journal.synced.segment < 4:
        await serve(journal, 50)
    eventually(lambda: journal.release(journal.synced) or segment_numbers(journal.directory)[0] >= 4)
    assert long in read_all(journal.directory)
    assert ended(long) is not None
    await journal.end(ended(long))
    kinds = [type(r) for r in read_all(journal.directory) if r.id == long.id]
    assert kinds[-1] is Ended


def test_a_life_is_locked_while_it_lasts(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    assert leftovers(tmp_path, "another") == [journal.directory]
    with pytest.raises(BlockingIOError):
        lock_life(journal.directory)
    journal.close()
    lock_life(journal.directory).close()
    assert leftovers(tmp_path, journal.life) == []


def test_records_are_bounded() -> None:
    longest = accepted(
        tenant_id="t" * 63,
        key_id="k" * 32,
        adapter="a" * 63,
        digest="d" * 64,
        endpoint="e" * 32,
        version=2**31 - 1,
        key_hash=2**64 - 1,
    )
    row = ended(longest, status="s" * 32, prompt_tokens=2**62, cached_tokens=2**62, completion_tokens=2**62)
    assert len(encode(row)) <= MAX_RECORD_BYTES


@pytest.mark.parametrize("record", [accepted(), ended()])
def test_records_of_servers_before_key_hashes_are_read(record: Record) -> None:
    fields = msgspec.msgpack.decode(encode(record)[8:])
    payload = msgspec.msgpack.encode(fields[:-1])
    written = struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    assert [found for found, _, _ in decode_all(written)] == [record]


KILLED = """
import asyncio, sys
from pathlib import Path
from loraplex.control.usage.journal import UsageJournal
from support.control.usage import AT, accepted, ended

async def one(journal):
    while True:
        request = accepted()
        journal.accept(request)
        await journal.end(ended(request))
        sys.stdout.write(request.id + chr(10))
        sys.stdout.flush()

async def main():
    journal = UsageJournal(Path(sys.argv[1]), segment_bytes=65536)
    await asyncio.gather(*(one(journal) for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.slow
def test_kill_9_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": importable_tests()}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        promised = {line for line in [first, *process.stdout] if line.endswith("\n")}
    (life,) = leftovers(tmp_path, "")
    kept = [record.id for record in read_all(life) if isinstance(record, Ended)]
    assert len(kept) == len(set(kept))
    assert {line.strip() for line in promised} <= set(kept)


def test_records_are_arrays_in_this_order() -> None:
    """What one version wrote another may have to read."""
    request = accepted(id="r1", adapter="support", version=3, digest="d" * 64, streamed=True, n=2, key_hash=9)
    row = request.ended(
        AT,
        "stop",
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=5,
        queue_s=0.25,
        first_token_s=0.5,
        total_s=1.5,
    )
    begin = ["r1", AT, "acme", "k1", "support", 3, "d" * 64, "/v1/completions", True, 2]
    header = 8
    assert msgspec.msgpack.decode(encode(request)[header:]) == ["a", *begin, 9]
    assert msgspec.msgpack.decode(encode(row)[header:]) == ["e", *begin, "stop", 10, 4, 5, 0.25, 0.5, 1.5, 9]


def test_a_start_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Segment:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module, "Segment", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        UsageJournal(tmp_path)
    assert list(tmp_path.iterdir()) == []
