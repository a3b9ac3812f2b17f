"""A start on a disk without room: one line with the file, and the doctor's words for the disk."""

from __future__ import annotations

from pathlib import Path

from support.faults.small_disk import small_disk
from support.servers.live_server import write_tiny_model
from support.servers.run_here import run_here


def test_a_start_names_the_file_and_says_what_the_doctor_says(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        data = disk.root / "data"
        options = ("--model", model, "--data-dir", str(data), "--port", "0", "--admin-port", "0")
        remedy = "make room: 1.2 GiB are wanted, for usage (--usage-journal-size) and the database"
        files = set()
        for left in (8 << 10, 512 << 10):
            disk.leave(left)
            started = run_here("serve", *options)
            (told,) = [line for line in started.stderr.splitlines() if line.startswith("loraplex: ")]
            assert started.code == 1
            assert f"{data}, 0.0 GiB free on tmpfs" in told
            assert told.endswith(f": {remedy}.")
            files.add(told.partition(" no room for ")[2].partition(":")[0].rpartition(".")[2])
        assert files == {"db", "segment"}
        checked = run_here("doctor", "--data-dir", str(data)).stdout
        assert f"wrong data directory: {data}, 0.0 GiB free on tmpfs" in checked
        assert remedy in checked
