"""How the installed transformers reads each family's checkpoint: a program, to be run under several of its versions.

    python -m support.models.read_families CHECKPOINTS OUT

CHECKPOINTS holds a folder for each family. OUT gets, as torch saves it: the version, and for each family the plan of
the fused decoder or the class that serves it, and logits of a prompt; or the error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from support.models.checkpoints import PagedRun
from support.models.loading import load_model, plan_model

_PROMPT = [1, *range(20, 60), *range(90, 50, -3)]


def read_family(model_dir: Path) -> dict[str, Any]:
    """`plan` and `logits` [L, V], or `error`."""
    try:
        plan = plan_model(model_dir, "cpu", torch.float32, kernels="torch")
        model = load_model(model_dir, "cpu", torch.float32, kernels="torch")
        run = PagedRun(model, [_PROMPT])
        run.step({0: len(_PROMPT)})
        return {"plan": f"{plan.model_type}: {plan.spec!r}", "logits": torch.cat(run.logits[0])}
    except Exception as error:  # of any kind: the difference between two versions is what is wanted
        return {"error": f"{type(error).__name__}: {error}"}


def main(checkpoints: Path, out: Path) -> None:
    import transformers

    torch.set_num_threads(1)
    families = {folder.name: read_family(folder) for folder in sorted(checkpoints.iterdir())}
    torch.save({"version": transformers.__version__, "families": families}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
