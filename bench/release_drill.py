"""Bad versions on a real server, released to half of the users with a guard: how many meet each before it goes back.

    PYTHONPATH=tests:. python -m bench.release_drill [--only noise,endless] [--at-once 8] [--limit 300]

Starts `loraplex serve` with a tiny model for each case, and uploads a good version and a bad one. Users who each ask
once come `--at-once` at a time, until the guard has rolled the release back or `--limit` seconds are over. Prints the
users whom the bad version answered or failed, those whom it failed, those of both versions with ten seconds more,
seconds from the release's begin to its rollback, seconds from then until the last request to the bad version was sent,
the machine's load, and the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from support.adapters.drafts import ALL_SITES, draft_adapter
from support.faults import slow_serve
from support.faults.damage import flip_a_bit
from support.releases.planted import (
    Crowd,
    write_brief_adapter,
    write_endless_adapter,
    write_shifted_adapter,
)
from support.servers.live_server import (
    SERVE,
    TINY,
    TINY_SIZES,
    LiveServer,
    checked,
    write_tiny_model,
)

BAD = "bot@v2"
RELEASE = "tenants/acme/adapters/bot/release"
BAD_LETTER = "~"
"""A letter at which the bad version overflows."""
SLOWER = 0.2


def _noisy(folder: Path) -> Path:
    """Random A and B in every site."""
    draft_adapter(TINY, targets=(*ALL_SITES, "lm_head"), seed=7, scale=1.0).write(folder)
    return folder


def _one_in_fifty(number: int) -> str:
    return f"user {number} says{BAD_LETTER if number % 50 == 0 else ''}"


@dataclass(frozen=True)
class Case:
    """`write` makes the bad version, `good` the other. `is_lost`: its stored bytes are damaged before it is released.
    `is_slow`: the server delays its first tokens. `guard` is a release's, `fields` are of each request."""

    name: str
    write: Callable[[Path], Path]
    guard: Mapping[str, Any] = field(default_factory=dict)
    is_lost: bool = False
    is_slow: bool = False
    good: Callable[[Path], Path] = write_brief_adapter
    prompt: Callable[[int], str] = "user {} says".format
    fields: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "noise": Case("noise in B", _noisy),
    "endless": Case("never stops", write_endless_adapter),
    "load": Case("load fails", partial(write_brief_adapter, strength=0.99), is_lost=True),
    "ttft": Case(
        f"{SLOWER:.0%} slower first token, margin 5 %",
        partial(write_brief_adapter, strength=0.99),
        {"metrics": [{"name": "ttft", "margin": 0.05}]},
        is_slow=True,
    ),
    "nan": Case(
        "2 % NaN",
        partial(write_shifted_adapter, overflows_at=BAD_LETTER),
        good=write_shifted_adapter,
        prompt=_one_in_fifty,
        fields={"logit_bias": {str(ord(BAD_LETTER)): -100}},  # in prompts alone
    ),
}


@dataclass(frozen=True)
class Found:
    """The result of a case: the bad version's users, those of them who got an error, and the users of both versions.
    `reason` is None where the release was not rolled back in time."""

    users: int
    failed: int
    asked: int
    reason: str | None
    seconds: float | None
    after_s: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="some of the cases, with commas")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a case")
    options = parser.parse_args()
    print(f"{'':38} users of it  failed  of all  seconds   then  load  reason", flush=True)
    for name in options.only.split(","):
        found = _run(CASES[name], options.at_once, options.limit)
        seconds = "–" if found.seconds is None else f"{found.seconds:.1f}"
        after = "–" if found.after_s is None else f"{found.after_s:.1f}"
        print(
            f"{CASES[name].name:38} {found.users:11} {found.failed:7} {found.asked:7} {seconds:>8} {after:>6} "
            f"{os.getloadavg()[0]:5.1f}  {found.reason or 'not rolled back'}",
            flush=True,
        )


def _run(case: Case, at_once: int, limit_s: float) -> Found:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        server = LiveServer(
            write_tiny_model(folder / "model"),
            folder / "data",
            dtype="float32",
            **TINY_SIZES | {"adapter_image_cache": "0"},
        )
        if case.is_slow:
            assert server.command[: len(SERVE)] == list(SERVE)
            server.command[: len(SERVE)] = [sys.executable, slow_serve.__file__, "2", str(SLOWER), "serve"]
        with server:
            server.create_tenant("acme")
            key = server.create_key("acme")
            server.upload("acme", "bot", case.good(folder / "v1"))
            bad = server.upload("acme", "bot", case.write(folder / "v2"))
            if case.is_lost:
                _lose(server, bad["digest"])
            return _release(server, key, case, at_once, limit_s)


def _lose(server: LiveServer, digest: str) -> None:
    """The version's bytes are damaged, and nothing in memory has them: only what is released is loaded at a start."""
    server.stop()
    flip_a_bit(server.data_dir / "artifacts" / "sha256" / digest[:2] / digest)
    server.start()


def _release(server: LiveServer, key: str, case: Case, at_once: int, limit_s: float) -> Found:
    targets = [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}]
    crowd = Crowd(server, key, "bot", at_once=at_once, prompt=case.prompt, fields=case.fields)
    try:
        server.wait(lambda: len(crowd.asked) > 4 * at_once)
        begun = checked(
            server.admin.put(RELEASE, json={"targets": targets, "sticky": "user", "guard": case.guard})
        )
        before, end = len(crowd.asked), time.monotonic() + limit_s
        while (now := checked(server.admin.get(RELEASE)))["run"]["status"] == "running":
            if time.monotonic() > end:
                return _found(crowd, before)
            time.sleep(0.25)
        rolled_back = _time(now["created_at"])
        server.wait(lambda: time.time() - rolled_back > 10)
        last = max((asked.at for asked in crowd.of(BAD)), default=rolled_back)
        return _found(
            crowd, before, now["reason"], rolled_back - _time(begun["created_at"]), last - rolled_back
        )
    finally:
        crowd.stop()


def _found(
    crowd: Crowd,
    before: int,
    reason: str | None = None,
    seconds: float | None = None,
    after_s: float | None = None,
) -> Found:
    users = crowd.of(BAD)
    failed = sum(asked.code is not None for asked in users)
    return Found(len(users), failed, len(crowd.asked) - before, reason, seconds, after_s)


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    main()
