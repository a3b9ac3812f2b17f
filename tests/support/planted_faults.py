"""Faults of one line, one a subsystem, each planted in a copy of the checkout: the tests that should find it must fail.

    make faults [ARGS="--only kv-blocks,drain"]

Run it after tests have left the run. The tests of each fault are part of `make test-all`: the long versions of `make
soak` are not asked. Prints one line a fault, and ends with 1 where one is not found, or its line is gone from the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")
"""Folders that hold the namespace package."""


@dataclass(frozen=True)
class Fault:
    """`right` stands once in the file `path`, below the checkout, and becomes `wrong`. `tests`: what should find it."""

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


ENGINE, KERNELS, SERVING = "server/loraplex/engine/", "kernels/loraplex/kernels/", "server/loraplex/serving/"
FAULTS = {
    "fairness": Fault(
        f"{ENGINE}scheduling/fair_queue.py",
        "self._charge(self._tenants[seq.request.tenant_id], units)",
        "self._charge(self._tenants[seq.request.tenant_id], 1.0)",
        ("tests/engine/scheduling/test_fairness.py",),
    ),
    "kv-blocks": Fault(
        f"{ENGINE}kv/prefix_keys.py",
        "return request.tenant_id, None if",
        'return "", None if',
        ("tests/engine/scheduling/test_blocks.py", "tests/engine/scheduling/test_scheduler.py"),
    ),
    "windows": Fault(
        f"{KERNELS}attention/triton_attention.py",
        "HAS_WINDOW=window is not None",
        "HAS_WINDOW=False",
        ("tests/kernels/attention/test_attention_kernels.py",),
    ),
    "adapters": Fault(
        "adapters/loraplex/adapters/device/host_image.py",
        "* np.float32(self._spec.sites[index].scaling)",
        "* np.float32(1)",
        ("tests/engine/model/test_model_lora.py",),
    ),
    "gguf": Fault(
        "adapters/loraplex/adapters/base_weights/gguf_blocks.py",
        "fifth = blocks[:, None, 16:48] >>",
        "fifth = blocks[:, None, 17:49] >>",
        ("tests/adapters/base_weights/test_gguf.py",),
    ),
    "grammars": Fault(
        f"{ENGINE}sampling/sampler.py",
        "x.masked_fill_(allowed == 0, float(",
        "x.masked_fill_(allowed < 0, float(",
        ("tests/engine/sampling/test_masks.py",),
    ),
    "watchdog": Fault(
        f"{SERVING}supervision/watchdog.py",
        "stalled = self._last.stalled_s",
        "stalled = 0.0",
        ("tests/serving/test_watchdog.py",),
    ),
    "drain": Fault(
        "server/loraplex/api/drain.py",
        "self.phase = DrainPhase.GRACE",
        "self.phase = DrainPhase.REFUSING",
        ("tests/e2e/lifecycle/test_drain.py::test_a_drain_finishes_what_runs",),
    ),
    "limits": Fault(
        "server/loraplex/control/limits/gcra.py",
        "self._tat = max(self._tat, now) + seconds",
        "self._tat = max(self._tat, now) + seconds / 2",
        ("tests/control/limits/test_limits.py",),
    ),
    "linears": Fault(
        f"{KERNELS}linear/triton_groups.py",
        "group = block // BLOCKS",
        "group = (block + 1) // BLOCKS",
        ("tests/kernels/linear/test_splits_triton.py",),
    ),
    "uploads": Fault(
        "adapters/loraplex/adapters/store/artifact_store.py",
        "self.fault(FaultPoint.RETIRE, folder, doomed)",
        "self.fault(FaultPoint.DISCARD, folder, doomed)",
        ("tests/control/catalog/test_crash_points.py",),
    ),
    "numbers": Fault(
        "adapters/loraplex/adapters/numerics/check.py",
        "site: found if finite and np.isfinite(found).all() else None",
        "site: found",
        ("tests/adapters/numerics",),
    ),
}


def copy_of_the_checkout(folder: Path) -> None:
    """What git tracks or would, without what is ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def is_found(fault: Fault, copy: Path) -> str:
    """What became of it: "found", or why not."""
    path = copy / fault.path
    text = path.read_text("utf-8") if path.is_file() else ""
    if text.count(fault.right) != 1:
        return f"{fault.path} has no single line for it: mend this table"
    path.write_text(text.replace(fault.right, fault.wrong), "utf-8")
    places = [str(copy / portion) for portion in PORTIONS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not soak",
        *fault.tests,
    ]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text, "utf-8")
    if done.returncode == 1 and " failed" in done.stdout:
        return "found"
    return f"NOT FOUND: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="these faults alone, separated by commas")
    chosen = [name for name in parser.parse_args().only.split(",") if name] or list(FAULTS)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_of_the_checkout(Path(folder))
        for name in chosen:
            began = time.monotonic()
            told = is_found(FAULTS[name], Path(folder))
            lost += told != "found"
            print(f"{name:12} {time.monotonic() - began:6.1f} s  {told}", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
