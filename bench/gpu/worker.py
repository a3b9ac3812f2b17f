"""One process that runs cases as it is told, so that what crashes or hangs takes no other case with it.

It writes a line of JSON for each line that it reads. First, unasked, what there is to run and on what; then a result
for each key of a case; before it {"building": true} and {"building": false} around what the case has made for others
too, such as a model.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from bench.gpu.case import Bench, Case, Skipped
from support.kernels.ordered_dots import order_dots


def main() -> None:
    # What libraries print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, name, *arguments = sys.argv[1].split(":")
    make: Callable[..., list[Case]] = getattr(importlib.import_module(module), name)
    cases = {case.key: case for case in make(*arguments)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        order_dots()  # cases compare bits
    bench = Bench(device, lambda building: print(json.dumps({"building": building}), file=answers))
    listed = [{"key": case.key, "limit_s": case.limit_s, "alone": case.alone} for case in cases.values()]
    answers.write(json.dumps({"cases": listed, "environment": environment(device)}) + "\n")
    for line in sys.stdin:
        found = run_one(cases[json.loads(line)], bench)
        leaving = not usable(device)  # whatever came next would fail for it
        answers.write(json.dumps(plain(found | {"leaving": leaving})) + "\n")
        if leaving:
            break


def run_one(case: Case, bench: Bench) -> dict[str, Any]:
    begun = time.monotonic()
    found: dict[str, Any] = {"case": case.key}
    try:
        rows = case.run(bench)
        rows = rows if isinstance(rows, list) else [rows]
        right = all(row.get("ok", True) for row in rows)
        found |= {"status": "ok" if right else "wrong", "rows": rows}
    except Skipped as skipped:
        found |= {"status": "skipped", "rows": [], "note": str(skipped)}
    except Exception as error:
        note = "".join(traceback.format_exception(error)[-3:])[-1500:]
        found |= {
            "status": "failed",
            "rows": [],
            "note": f"{type(error).__name__}: {error}"[:500],
            "trace": note,
        }
    if found["status"] == "failed":
        bench.drop()  # what failed for want of memory may be the next one's neighbour
    return found | {"seconds": round(time.monotonic() - begun, 2)}


def usable(device: torch.device) -> bool:
    """A kernel that went astray leaves nothing behind that could be used."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the device that results depend on, or that a reader asks for."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "numpy"):
        found[name] = version(name)
    if device.type != "cuda":
        return found | {"device": f"cpu, interpreted ({platform.machine()})"}
    traits = torch.cuda.get_device_properties(device)
    return found | {
        "device": traits.name,
        "multiprocessors": traits.multi_processor_count,
        "memory_gib": round(traits.total_memory / (1 << 30), 1),
        "cuda": torch.version.cuda,
        "driver": driver(),
    }


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.split("\n")[0].strip()


if __name__ == "__main__":
    main()
