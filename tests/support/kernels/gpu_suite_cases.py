"""Cases for the GPU suite that go wrong in every way that a case can, and right ones between them."""

from __future__ import annotations

import os
import signal
import time

from bench.gpu.case import Bench, Case, Row


def cases() -> list[Case]:
    return [
        Case("checks", "right", lambda bench: {"case": "right", "ok": True}, alone=False),
        Case(
            "checks",
            "wrong",
            lambda bench: [{"case": "a", "ok": True}, {"case": "b", "ok": False}],
            alone=False,
        ),
        Case("checks", "raises", _raise, alone=False),
        Case("steps", "dies", lambda bench: os.kill(os.getpid(), signal.SIGKILL)),
        Case("steps", "held", lambda bench: {"rows": 1, "held": bench.hold("a", os.getpid)}),
        Case("steps", "hangs", lambda bench: time.sleep(600), limit_s=1),
        Case("steps", "prints", _print),
        Case("steps", "infinite", lambda bench: {"rows": 3, "lora_to_base": float("inf")}),
    ]


def slow_cases() -> list[Case]:
    """The second outlasts any budget that a test gives."""
    return [
        Case("steps", "first", lambda bench: {"rows": 1}),
        Case("steps", "second", lambda bench: time.sleep(600), limit_s=900),
        Case("steps", "third", lambda bench: {"rows": 3}),
    ]


def _raise(bench: Bench) -> Row:
    raise ValueError("out of | memory")


def _print(bench: Bench) -> Row:
    print("not an answer")
    return {"rows": 2}
