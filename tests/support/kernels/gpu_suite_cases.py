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


def building_cases() -> list[Case]:
    """Both build for longer than their limit; the first dies of what comes after."""
    return [
        Case("steps", "builds and dies", _build_and_die, limit_s=0.5),
        Case("steps", "builds again", lambda bench: {"rows": bench.hold("model", _build)}, limit_s=0.5),
        Case("steps", "builds, then hangs", _build_and_hang, limit_s=0.5),
        Case("steps", "is built", lambda bench: {"rows": bench.hold("model", _build)}, limit_s=0.5),
    ]


def slow_cases() -> list[Case]:
    """The second outlasts any budget that a test gives."""
    return [
        Case("steps", "first", lambda bench: {"rows": 1}),
        Case("steps", "second", lambda bench: time.sleep(600), limit_s=900),
        Case("steps", "third", lambda bench: {"rows": 3}),
    ]


def _build() -> int:
    time.sleep(1)
    return 1


def _build_and_die(bench: Bench) -> Row:
    bench.hold("model", _build)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _build_and_hang(bench: Bench) -> Row:
    bench.hold("another model", _build)
    time.sleep(600)
    return {}


def _raise(bench: Bench) -> Row:
    raise ValueError("out of | memory")


def _print(bench: Bench) -> Row:
    print("not an answer")
    return {"rows": 2}
