"""`loraplex engine --join`: one engine that dials a server, and goes on when that server restarts."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from functools import partial

import structlog
import uvloop

from loraplex.adapters.store.probe import read_probe
from loraplex.app.base_model.served_tokenizer import served_model
from loraplex.app.base_model.source import default_served_name
from loraplex.app.engine_settings import engine_config
from loraplex.app.engines.logs import engine_rules
from loraplex.app.engines.port import load_engine_token
from loraplex.app.engines.tls import engine_tls
from loraplex.app.logs import configure_logging, log_everything
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.stop_signals import StopSignals
from loraplex.app.storage.artifacts import artifact_store
from loraplex.app.storage.data_dir_lock import make_data_dir
from loraplex.serving.dialling.hello import MAX_NAME, NAME
from loraplex.serving.dialling.relay import Door, Relay
from loraplex.serving.supervision.engine_supervisor import ENGINE_COMMAND


def run_engine(settings: Settings, join: str, replica: str | None) -> int:
    """Run until a signal; the exit code. Raises LoraplexError, which says in one line why the start failed, or why the
    engine stays down."""
    configure_logging(settings.log_level)
    log_everything()
    return uvloop.run(
        _run(make_relay(settings, join, replica or socket.gethostname()), settings.drain_timeout)
    )


def make_relay(settings: Settings, join: str, replica: str, command: Sequence[str] = ENGINE_COMMAND) -> Relay:
    """The relay of an engine that is to join the server at this address under this name. The model is fetched first
    where this machine does not have it. Raises LoraplexError. `command` starts the engine process."""
    host, port = parse_address(join)
    name = check_name(replica)
    log = structlog.get_logger("loraplex")
    if not settings.model:
        raise SettingsInvalid("--model (or LORAPLEX_MODEL) is needed: that of the server.")
    make_data_dir(settings.data_dir)
    load_engine_token(settings)
    tls = engine_tls(settings)
    try:
        store = artifact_store(settings)
    except OSError as error:
        raise SettingsInvalid(f"the engine cannot start: {error}.") from error
    model_dir = served_model(settings, lambda line: log.info("preparing", step=line))
    served_name = settings.served_model_name or default_served_name(settings.model)
    return Relay(
        engine_config(settings, model_dir, served_name, number_in(name)),
        Door(host, port, lambda: load_engine_token(settings), partial(read_probe, store), tls),
        replica=name,
        node=socket.gethostname(),
        rules=engine_rules(name, keep_spare=settings.engine_spare, command=command),
    )


def parse_address(join: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT. Raises SettingsInvalid."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", join)
    if match is None or not 0 < int(match[3]) <= 65535:
        raise SettingsInvalid(
            f"--join: HOST:PORT is expected, of the server's --engine-port (got '{join[:80]}')."
        )
    return match[1] or match[2], int(match[3])


def number_in(replica: str) -> int:
    """The number from 0 to 63 at the end of a replica's name, as of gpu1 and engine-1; 0 without one."""
    found = re.search(r"(?:^[A-Za-z]*|[-._])(\d{1,2})$", replica)
    return int(found[1]) % 64 if found else 0


def check_name(replica: str) -> str:
    """The name of a replica. Raises SettingsInvalid."""
    if not re.fullmatch(NAME, replica) or len(replica) > MAX_NAME:
        raise SettingsInvalid(
            f"--replica: at most {MAX_NAME} of A-Z, a-z, 0-9, '.', '_' and '-' are expected (got '{replica[:80]}')."
        )
    return replica


async def _run(relay: Relay, drain_s: float) -> int:
    log = structlog.get_logger("loraplex")
    stop = StopSignals()
    with stop.installed():
        stopping = stop.first_task()
        running = asyncio.create_task(relay.run())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            else:
                log.info("draining", in_flight=relay.num_live)
                draining, second = asyncio.create_task(relay.drain(drain_s)), stop.second_task()
                await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
                second.cancel()
                log.info("drained", finished=not relay.num_live, cut=relay.num_live)
            return 0
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await relay.close()
