"""Compiled kernels on the disk: `loraplex.kernels.numba_runtime.cache`. Each case in processes of its own, over a
package of three small modules in the place of the kernels, as each process chooses its directory once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

from loraplex.kernels.numba_runtime import cache as numba_cache

CALLEE = """
from numba import njit
from stand_in.cache import KERNELS

@KERNELS.cache_function
@njit
def inner(x):
    return x + 1
"""
CALLER = """
from numba import njit
from stand_in.cache import KERNELS
from stand_in.callee import inner

@KERNELS.cache_function
@njit
def outer(x):
    return inner(x) * 10
"""
RUN = """
import sys
from stand_in.cache import KERNELS
from stand_in.caller import outer
before = KERNELS.is_compiled("int64")
KERNELS.compile("int64", lambda: outer(1))
(hits,) = outer.stats.cache_hits.values() or (0,)
print(outer(1), before, hits, KERNELS.directory)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "stand_in"
    package.mkdir()
    (package / "cache.py").write_text(Path(numba_cache.__file__).read_text())
    (package / "callee.py").write_text(CALLEE)
    (package / "caller.py").write_text(CALLER)
    return package


def command(package: Path, program: str = RUN, **environment: str) -> subprocess.Popen[str]:
    names = {
        "PYTHONPATH": str(package.parent),
        "XDG_CACHE_HOME": str(package.parent / "cache"),
        "NUMBA_CACHE_DIR": "",
    }
    return subprocess.Popen(
        [sys.executable, "-B", "-c", program],
        env=os.environ | names | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """(What the program printed, its warnings.)"""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split(), err


@pytest.mark.slow
def test_next_process_reads_compiled_kernels(package: Path) -> None:
    first, warned = said(command(package))
    assert first[:3] == ["20", "False", "0"]
    assert warned == ""
    directory = Path(first[3])
    assert directory.parent == package.parent / "cache" / "loraplex" / "kernels"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert said(command(package))[0] == ["20", "True", "1", str(directory)]


@pytest.mark.slow
def test_nothing_is_touched_before_something_is_compiled(package: Path) -> None:
    assert said(command(package, "import stand_in.caller"))[0] == []
    assert not (package.parent / "cache").exists()
    # Without anybody asking for the cache first, and with a function that is made afterwards.
    late = "from stand_in.caller import outer\nouter(1)\nfrom stand_in.cache import KERNELS\nfrom numba import njit\n"
    late += "@KERNELS.cache_function\n@njit\ndef later(x): return x\nprint(later(1), outer(1))"
    (package / "late.py").write_text(late)
    assert said(command(package, "import stand_in.late"))[0] == ["1", "20"]
    kept = {path.name.partition("-")[0] for path in (package.parent / "cache").rglob("*.nbi")}
    assert kept == {"caller.outer", "callee.inner", "late.later"}


def test_kernels_touch_nothing_before_one_is_compiled(tmp_path: Path) -> None:
    program = "import loraplex.kernels.numba_warm_up"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_changed_callee_is_compiled_with_its_callers(package: Path) -> None:
    before, _ = said(command(package))
    (package / "callee.py").write_text(CALLEE.replace("x + 1", "x + 2"))
    after, _ = said(command(package))
    assert after[:3] == ["30", "False", "0"]
    assert after[3] != before[3]


@pytest.mark.slow
def test_numba_cache_dir_is_kept_to(package: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    told, _ = said(command(package, NUMBA_CACHE_DIR=str(chosen)))
    assert Path(told[3]).parent == chosen
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_a_compilation_and_a_warning(
    package: Path, tmp_path: Path
) -> None:
    # A file where the directory would be: root may write anywhere else.
    (tmp_path / "cache").write_text("")
    for _ in range(2):
        told, warned = said(command(package))
        assert told == ["20", "False", "0", "None"]
        assert warned.count("can't be kept") == 1
        assert "NUMBA_CACHE_DIR" in warned
    assert not (package / "__pycache__").exists()


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again(package: Path) -> None:
    told, _ = said(command(package))
    for path in Path(told[3]).glob("*/*.nbi"):
        path.write_bytes(b"")
    healed, warned = said(command(package))
    assert healed[0] == "20"
    assert "damaged" in warned
    assert said(command(package)) == (["20", "True", "1", told[3]], "")


@pytest.mark.slow
def test_processes_that_start_at_once_get_their_own_types(package: Path) -> None:
    # Slow enough for each to have read the index before another one writes it, if it is let.
    slow = """
import time
from numba.core.caching import IndexDataCacheFile
load = IndexDataCacheFile._load_index
def load_slowly(self):
    index = load(self)
    time.sleep(0.3)
    return index
IndexDataCacheFile._load_index = load_slowly
"""
    program = slow + RUN.replace("outer(1)", "outer({})")
    numbers = ("1", "1.5", "1j", "True")
    for hits in ("0", "1"):
        started = [command(package, program.replace("{}", number)) for number in numbers]
        results = [said(process)[0] for process in started]
        assert [result[0] for result in results] == ["20", "25.0", "(10+10j)", "20"]
        assert [result[2] for result in results] == [hits] * 4


TAKE_TURNS = """
import time
from stand_in import caller
from numba.core.compiler_lock import global_compiler_lock
begin = time.time()
for _ in range(60):
    with global_compiler_lock:
        with global_compiler_lock:
            pass
print(begin, time.time())
"""


@pytest.mark.slow
def test_one_process_compiles_at_a_time(package: Path) -> None:
    directory = Path(said(command(package))[0][3])
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = command(package, TAKE_TURNS)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(5)
        released = time.time()
    assert float(said(waiting)[0][1]) >= released


@pytest.mark.slow
def test_stuck_compiler_delays_others_for_a_bounded_time(package: Path) -> None:
    source = (package / "cache.py").read_text()
    (package / "cache.py").write_text(source.replace("LOCK_WAIT_S = 120.0", "LOCK_WAIT_S = 0.5"))
    directory = Path(said(command(package))[0][3])
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin, end = map(float, said(command(package, TAKE_TURNS))[0])
        assert end - begin < 15  # once, not each time, which takes 30 s
        assert said(command(package))[0][:3] == ["20", "True", "1"]


@pytest.mark.slow
def test_directories_of_other_contents_go_after_a_month_without_use(package: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "loraplex" / "kernels"
    month = 31 * 86400
    for name, age in (("loraplex-old", month), ("loraplex-recent", month - 2 * 86400), ("another", month)):
        (root / name / "inside").mkdir(parents=True)
        os.utime(root / name, (time.time() - age,) * 2)
    told, _ = said(command(package))
    used = Path(told[3]).name
    assert {path.name for path in root.iterdir()} == {"another", "loraplex-recent", used}
    # Its own counts as used by a start that compiles nothing.
    os.utime(root / used, (time.time() - month,) * 2)
    said(command(package))
    assert time.time() - (root / used).stat().st_mtime < 3600


@pytest.mark.parametrize("made", ["writable", "linked"])
def test_a_directory_that_others_could_put_code_into_is_not_used(made: str, tmp_path: Path, caplog) -> None:
    sources, root = Path(numba_cache.__file__).parents[1], tmp_path / "root"
    directory = numba_cache.open_cache(root, sources)
    assert directory is not None
    if made == "writable":
        directory.chmod(0o777)
    else:
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    assert numba_cache.open_cache(root, sources) is None
    assert "others may write to it" in caplog.text


def test_every_source_of_the_kernels_counts(tmp_path: Path) -> None:
    sources = tmp_path / "kernels"
    shutil.copytree(
        Path(numba_cache.__file__).parents[1], sources, ignore=shutil.ignore_patterns("__pycache__")
    )
    root = tmp_path / "root"
    seen = {numba_cache.open_cache(root, sources)}
    for path in sources.rglob("*.py"):
        path.write_text(path.read_text() + "# changed\n")
        seen.add(numba_cache.open_cache(root, sources))
    assert None not in seen
    assert len(seen) == 1 + len(list(sources.rglob("*.py")))
