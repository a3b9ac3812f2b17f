"""Findings of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is what there is, `remedy` what to do about it; empty where nothing is wrong."""

    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding("fail", found, remedy)
