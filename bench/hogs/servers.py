"""Servers with the tenants of a measurement, and settings that are compared in turns."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.hogs.mixes import ACTIVATED, INVOCATION, Mix
from bench.hogs.tenants import Target
from support.servers.live_server import SERVED_NAME, LiveServer, write_real_adapter

SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16
Setting = dict[str, str]
"""Options of `loraplex serve`, without their dashes."""


def parse_setting(given: str) -> Setting:
    """From "--max-step-ms 0 --threads 1"; each option has a value."""
    words = shlex.split(given)
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise SystemExit(f"--compare takes options with a value each, not {given!r}")
    return {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }


def name_of(given: str) -> str:
    return f"`{given}`" if given else "default"


def in_turns(settings: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The settings' order in each round: every other one is reversed, so that what the machine does meanwhile falls on
    all of them alike."""
    for number in range(rounds):
        yield list(settings if number % 2 == 0 else reversed(settings))


@contextmanager
def serving(model: Path, given: str) -> Iterator[LiveServer]:
    """The quickstart's model with this setting, and all else as it is by default. Shows the log's end on a failure."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        LiveServer(
            model,
            Path(temporary) / "data",
            **{"threads": 0, "served_model_name": SERVED_NAME, **parse_setting(given)},
        ) as server,
    ):
        try:
            yield server
        except BaseException:
            print(server.log_tail(), file=sys.stderr)
            raise


def make_target(server: LiveServer, senders: int = 2) -> Target:
    """Makes the tenants `chat` and `hog-1` to `hog-N`."""
    keys = []
    for tenant in ("chat", *(f"hog-{number + 1}" for number in range(senders))):
        server.create_tenant(tenant)
        keys.append(server.create_key(tenant))
    return Target(server.data_url, SERVED_NAME, tuple(keys))


def upload_for(server: LiveServer, mix: Mix, work: Path) -> None:
    """The adapter that the mix asks."""
    if mix.model == ACTIVATED:
        tokens = server.client(server.create_key("hog-1")).post(
            "/tokenize", json={"model": SERVED_NAME, "prompt": INVOCATION}
        )
        upload(server, "hog-1", ACTIVATED, work, 0, alora_invocation_tokens=tokens.json()["tokens"])


def upload(server: LiveServer, tenant: str, name: str, work: Path, seed: int, **config: object) -> None:
    """A random adapter of rank 16 on all seven projections."""
    folder = work / f"{tenant}-{name}"
    write_real_adapter(folder, rank=RANK, targets=SITES, seed=seed, **config)
    server.upload(tenant, name, folder)
