"""The file of recorded demand: it comes back as it was written, or counts as none; a crash leaves one of the two."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.lifecycle import demand_file
from loraplex.lifecycle.demand_file import FILE_NAME, MAX_BYTES, DemandUnreadable, read_demand, write_demand
from loraplex.serving.demand import HALF_LIFE_S, MAX_RANKED, MAX_USES, Uses


def uses(count: int, first: int = 0) -> list[Uses]:
    return [
        Uses(AdapterRef("t" * 63, "a", 1, f"{first + n:064x}", 8), float(count - n)) for n in range(count)
    ]


def digests(folder: Path) -> list[int]:
    return [int(each.digest, 16) for each in read_demand(folder)]


def test_it_comes_back_in_order(tmp_path: Path) -> None:
    assert read_demand(tmp_path) == []
    write_demand(tmp_path, uses(3))
    write_demand(tmp_path, uses(2, first=7))
    assert digests(tmp_path) == [7, 8]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_the_largest_one_is_within_the_bound(tmp_path: Path) -> None:
    write_demand(tmp_path, [Uses(each.ref, MAX_USES) for each in uses(MAX_RANKED)])
    assert (tmp_path / FILE_NAME).stat().st_size <= MAX_BYTES
    assert len(read_demand(tmp_path)) == MAX_RANKED


@pytest.mark.parametrize(("age_s", "left"), [(HALF_LIFE_S, 1.5), (-1e9, 3.0), (1e12, 0.0)])
def test_uses_decay_while_no_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, left: float
) -> None:
    write_demand(tmp_path, uses(3))
    now = time.time()
    monkeypatch.setattr(demand_file.time, "time", lambda: now + age_s)
    assert read_demand(tmp_path)[0].uses == pytest.approx(left, abs=1e-3)


GOOD: dict[str, Any] = {"format": 1, "saved_at": 1.0, "uses": [["0" * 64, "acme", 1.0]]}
BAD = {
    "empty": b"",
    "cut": json.dumps(GOOD).encode()[:-3],
    "no text": b"\xff\xfe\x00",
    "no number": json.dumps(GOOD).replace("1.0]", "NaN]").encode(),
    "infinite": json.dumps(GOOD).replace("1.0]", "1e999]").encode(),
    "negative": json.dumps(GOOD).replace("1.0]", "-1]").encode(),
    "too much": json.dumps(GOOD).replace("1.0]", "1e13]").encode(),
    "a path": json.dumps(GOOD | {"uses": [["../" * 21 + "a", "acme", 1]]}).encode(),
    "capitals": json.dumps(GOOD | {"uses": [["A" * 64, "acme", 1]]}).encode(),
    "a line more": json.dumps(GOOD | {"uses": [["0" * 64 + "\n", "acme", 1]]}).encode(),
    "a long tenant": json.dumps(GOOD | {"uses": [["0" * 64, "t" * 64, 1]]}).encode(),
    "another format": json.dumps(GOOD | {"format": 2}).encode(),
    "more": json.dumps(GOOD | {"more": 1}).encode(),
    "too many": json.dumps(GOOD | {"uses": [["0" * 64, "t", 1]] * (MAX_RANKED + 1)}).encode(),
    "too large": json.dumps(GOOD).encode() + b" " * MAX_BYTES,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_server_wrote_counts_as_none(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(BAD[name])
    with pytest.raises(DemandUnreadable):
        read_demand(tmp_path)
    write_demand(tmp_path, uses(1))
    assert digests(tmp_path) == [0]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_no_link_folder_or_pipe_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / FILE_NAME
    if kind == "link":
        (tmp_path / "other").write_text(json.dumps(GOOD))
        path.symlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(DemandUnreadable):
        read_demand(tmp_path)


STEPS = ("unlink", "open", "write", "fsync", "replace")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_dies_at_a_step_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, step: str, when: str
) -> None:
    write_demand(tmp_path, uses(3))
    (tmp_path / f"{FILE_NAME}.new").write_bytes(b"what an earlier crash left")
    child = os.fork()
    if not child:
        try:
            _die_at(step, when)
            write_demand(tmp_path, uses(2, first=7))
        finally:
            os._exit(1)  # it did not die where it should
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert digests(tmp_path) == ([7, 8] if (step, when) == ("replace", "after") else [0, 1, 2])
    write_demand(tmp_path, uses(1, first=5))
    assert digests(tmp_path) == [5]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def _die_at(step: str, when: str) -> None:
    """In a process of its own: the steps go through these functions."""
    owner: Any = {"unlink": Path, "open": demand_file, "write": demand_file}.get(step, os)
    name = {"open": "create_file", "write": "write_all"}.get(step, step)
    real = getattr(owner, name)

    def die(*args: Any, **options: Any) -> None:
        if when == "after":
            real(*args, **options)
        os._exit(9)

    setattr(owner, name, die)


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_demand(tmp_path, uses(3))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(demand_file, "write_all", full)
    with pytest.raises(OSError, match="full"):
        write_demand(tmp_path, uses(2))
    assert digests(tmp_path) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
