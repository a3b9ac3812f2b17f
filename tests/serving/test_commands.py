"""The table of engine commands: complete, strict, and all that a new command needs beside its handler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.kv.prefix_keys import MAX_OWNERS, next_owners
from loraplex.serving.errors import EngineUnavailable, ServingError
from support.cluster.inprocess import InProcessEngineClient
from support.engine.fake_core import build_fake_engine

RUN_BY_CORE = [*wire.Notification.__subclasses__(), *wire.Call.__subclasses__()]


@pytest.mark.parametrize("command", RUN_BY_CORE)
def test_every_command_is_in_the_table_and_has_its_handler(command: type) -> None:
    assert command in get_args(wire.Command)
    assert "run" in vars(command)


def test_every_answer_is_an_event() -> None:
    assert set(wire.CallAnswer.__subclasses__()) <= set(get_args(wire.Event))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Call", "call": 1},
        {"type": "Notification"},
        {"type": "Pin", "call": 1},
        {"type": "Pin", "call": "1", "ref": {}},
        {"type": "Unpin", "digest": "a"},
        {"type": "SetTenants", "terms": {"acme": {"weight": "heavy"}}},
        {"type": "SetElsewhere", "digests": "abc"},
        {"type": "ExchangeService", "call": 1, "elsewhere": {"acme": "much"}},
        {"type": "GetStats", "call": None},
        {"type": "GetPrefixOwners", "call": 1, "after": "acme"},
        {"type": "Done", "call": 1},
    ],
    ids=str,
)
def test_a_command_with_bad_arguments_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(framing.ProtocolError, match=r"^not a command: "):
        wire.decode_command(msgspec.msgpack.encode(message))


def test_a_part_of_the_owners_of_prefixes_fits_a_frame_many_times() -> None:
    owners = {(f"{number:06}".ljust(64, "x"), "f" * 64) for number in range(2 * MAX_OWNERS)}
    part = next_owners(owners)
    assert len(part) == MAX_OWNERS
    frame = framing.encode_frame(wire.PrefixOwners(1, tuple(part)))
    assert len(frame) < framing.MAX_FRAME_BYTES / 10
    rest = next_owners(owners, part[-1])
    assert (owners, next_owners(owners, rest[-1])) == ({*part, *rest}, [])


class Double(wire.Call[wire.Stats], frozen=True):
    number: int

    def run(self, core: EngineCore) -> wire.Stats:
        if self.number > 100:
            raise LoraplexError(f"{self.number} is too large")
        return wire.Stats(self.call, replace(core.stats(), num_steps=2 * self.number))


async def test_client_and_loop_pass_on_a_command_that_they_do_not_know_by_name() -> None:
    client = InProcessEngineClient(lambda wake: build_fake_engine(EngineConfig("ok", "/"), wake))
    with pytest.raises(EngineUnavailable):
        await client.call(Double, 4)
    await client.start()
    try:
        assert (await client.call(Double, 4)).stats.num_steps == 8
        with pytest.raises(ServingError, match="101 is too large"):
            await client.call(Double, 101)
    finally:
        await client.close()
