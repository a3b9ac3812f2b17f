"""Admission of drafted adapters against a tiny base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from support.adapters.drafts import (
    AdapterDraft,
    AdapterFiles,
    TinyBase,
    site_module,
)

ARCH = TinyBase()
Q0 = f"base_model.model.{site_module(0, 'q_proj')}"


def halves(*shape: int) -> np.ndarray:
    return np.full(shape, 0.5, np.float32)


def admit(files: AdapterFiles, base: BaseSpec, **options: Any) -> AdapterSpec:
    return inspect_adapter(files.config, files.tensors, base, **{"max_rank": 16} | options)


def refusal(draft: AdapterDraft, directory: Path, base: BaseSpec, **options: Any) -> AdapterRefused:
    files = draft.write(directory)
    with pytest.raises(AdapterRefused) as caught:
        admit(files, base, **options)
    error = caught.value
    assert error.message.isascii()
    assert error.report is not None
    assert error.report["checks"][-1] == {
        "name": error.report["checks"][-1]["name"],
        "ok": False,
        "detail": error.message,
    }
    json.dumps(error.report, allow_nan=False)
    return error
