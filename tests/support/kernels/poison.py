"""New memory that is of no use to who reads before it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may stand on what new memory holds: from now on that is NaN."""
    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", full_of_nan)
