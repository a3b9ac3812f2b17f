"""An engine where numba is installed and does not work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loraplex.adapters.errors import LoraplexError
from loraplex.kernels.backend import resolve_kernels
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny

SIZES = {"kv_cache_memory": 1 << 20, "adapter_memory": 4 << 20, "adapter_cpu_memory": 4 << 20}
REPORT = """
from loraplex.adapters.errors import LoraplexError
from loraplex.engine.kernel_report import describe_kernels
print(describe_kernels("auto", "cpu", 1))
try:
    describe_kernels("numba", "cpu", 1)
except LoraplexError as error:
    print(error.message)
"""
ENGINE = """
import sys
from pathlib import Path
from support.engine.local_engine import LocalEngine
engine = LocalEngine(Path(sys.argv[1]), Path(sys.argv[2]), num_threads=1, kv_cache_memory=1 << 20,
                     adapter_memory=4 << 20, adapter_cpu_memory=4 << 20)
engine.add("one", [5] * 20)
while not engine.step():
    pass
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", {"model_type": "llama", "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("family", "kernels", "attention", "reason"),
    [
        ("llama", "torch", "triton", "it runs beside Triton's kernels"),
        ("mistral-window", "triton", "torch", "torch's attention has no sliding windows"),
        ("granite", "auto", "triton", "granite runs through transformers"),
    ],
)
def test_an_attention_that_cannot_be_had_ends_the_start_in_one_line(
    family: str, kernels: str, attention: str, reason: str, tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES.get(family, {"model_type": family, "num_hidden_layers": 1}))
    with pytest.raises(LoraplexError, match=f"^--attention {attention}: {reason}") as caught:
        LocalEngine(base, tmp_path / "work", kernels=kernels, attention=attention, num_threads=1, **SIZES)
    assert "\n" not in caught.value.message


def test_the_engine_tells_what_computes_its_attention_and_why(base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(base, tmp_path / "work", kernels="torch", num_threads=1, **SIZES)
    engine.close()
    info = engine.built.info
    assert (info.attention, info.attention_reason) == ("torch", "it goes with torch's other kernels")


def run(program: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)


def broken_numba(tmp_path: Path) -> str:
    """A PYTHONPATH whose numba fails as it does beside another numpy than its own."""
    package = tmp_path / "broken" / "numba"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less. Got NumPy 2.4.')")
    return os.pathsep.join([str(package.parent), str(Path(__file__).parents[2])])


@pytest.mark.slow
def test_doctor_tells_what_numba_fails_with(tmp_path: Path) -> None:
    no_import = run(REPORT, PYTHONPATH=broken_numba(tmp_path))
    no_code = run(REPORT, NUMBA_DISABLE_JIT="1")
    for done, reason in (
        (no_import, "numba failed with ImportError: Numba needs NumPy 2.3 or less. Got NumPy 2.4."),
        (no_code, "NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it"),
    ):
        assert done.returncode == 0, done.stderr
        auto, asked = done.stdout.splitlines()
        assert auto.startswith(f"torch, 1 thread; numba would be faster, but {reason}")
        assert asked.startswith(f"--kernels numba: the numba kernels can't run here: {reason}")


@pytest.mark.slow
def test_engine_runs_without_numba_and_says_so(base: Path, tmp_path: Path) -> None:
    done = run(ENGINE, base, tmp_path, PYTHONPATH=broken_numba(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "torch's kernels are used, which are slower: numba failed with ImportError" in done.stderr


def test_kernel_that_cannot_be_compiled(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numba_warm_up = pytest.importorskip("loraplex.kernels.numba_warm_up")

    def fail(*of: object, **options: object) -> None:
        raise RuntimeError("LLVM ERROR: cannot select\nmore")

    monkeypatch.setattr(numba_warm_up, "warm_up", fail)
    with pytest.raises(
        LoraplexError, match="--kernels numba: numba failed with RuntimeError: LLVM ERROR: cannot"
    ):
        LocalEngine(base, tmp_path / "asked", num_threads=1, kernels="numba", **SIZES)
    assert resolve_kernels("auto", torch.device("cpu")).backend == "numba"
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(base, tmp_path / "auto", num_threads=1, **SIZES)
    assert "torch's kernels are used, which are slower: numba failed with RuntimeError" in caplog.text
    engine.add("one", [5] * 20)
    engine.step()
