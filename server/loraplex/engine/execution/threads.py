"""How many threads compute."""

from __future__ import annotations

import torch

from loraplex.engine.control_groups import ControlGroups


def set_threads(asked: int, groups: ControlGroups | None = None, *, num_sharing: int = 1) -> str:
    """Set torch's threads, and so the kernels' team: `asked`, or where that is 0 torch's own choice, at most as many as
    a CPU quota has whole processors; of these, one part in `num_sharing`. More would use the quota up early in each
    period, and then stand still. Returns the number in words."""
    quota = None if asked else (groups or ControlGroups()).cpus()
    if asked:
        torch.set_num_threads(asked)
    elif quota is not None and quota < torch.get_num_threads():
        torch.set_num_threads(max(1, int(quota)))
    else:
        quota = None
    if not asked and num_sharing > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_sharing))
    threads = torch.get_num_threads()
    shown = f"{threads} thread{'s' if threads > 1 else ''}"
    return shown if quota is None else f"{shown} for a CPU quota of {quota:g}"
