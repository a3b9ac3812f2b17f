"""Traces of a server in an engine, and when an engine has none left."""

from __future__ import annotations

import msgspec

from loraplex.engine.ipc import protocol as wire
from loraplex.engine.tenant_terms import DEFAULT_TERMS, TenantTerms
from loraplex.engine.types import EngineError, TokenEvent
from loraplex.serving.cluster.engine_traces import BARRIER, TOKENS, EngineTraces
from support.engine.fake_processes import adapter, ask


def events(*items: TokenEvent) -> bytes:
    payload = msgspec.msgpack.encode(wire.Events(items))
    assert payload.startswith(TOKENS)
    return payload


def test_an_engine_is_clean_behind_the_barrier_and_the_last_answer() -> None:
    traces = EngineTraces()
    traces.note_command(wire.Add(ask("a")))
    traces.note_command(wire.Add(ask("b")))
    traces.note_command(wire.GetStats(1))
    traces.note_tokens(events(TokenEvent("a", (1,)), TokenEvent("b", (2,), finish_reason="stop")))
    assert (traces.num_live, traces.num_served) == (1, 1)
    assert traces.clean_up() == [wire.Abort(("a",)), wire.Ping(BARRIER)]
    traces.note_tokens(events(TokenEvent("a", finish_reason="abort")))
    assert not traces.is_clean, "an answer to the server may be on its way"
    traces.note_event(wire.Pong(1))
    assert not traces.is_clean
    traces.note_event(wire.Pong(BARRIER))
    assert traces.is_clean
    assert traces.num_served == 1


def test_the_end_of_an_aborted_request_is_waited_for() -> None:
    traces = EngineTraces()
    traces.note_command(wire.Add(ask("a")))
    traces.clean_up()
    traces.note_event(wire.Pong(BARRIER))
    refused = EngineError("internal_error", "it is in flight already")
    traces.note_tokens(events(TokenEvent("a", finish_reason="error", error=refused, duplicate=True)))
    assert not traces.is_clean, "the refusal speaks of another request"
    traces.note_tokens(events(TokenEvent("a", finish_reason="abort")))
    assert traces.is_clean


def test_pins_terms_and_homes_of_a_server_end_with_it() -> None:
    traces = EngineTraces()
    traces.note_command(wire.Pin(1, adapter(1)))
    traces.note_command(wire.Pin(2, adapter(2)))
    traces.note_command(wire.Unpin(3, adapter(1).digest))
    traces.note_command(wire.SetTenants({"acme": TenantTerms(3.0)}))
    traces.note_command(wire.SetElsewhere((adapter(3).digest,)))
    expected = [wire.Unpin(BARRIER, adapter(2).digest), wire.SetTenants({"acme": DEFAULT_TERMS})]
    assert traces.clean_up() == [*expected, wire.SetElsewhere(()), wire.Ping(BARRIER)]
    assert traces.clean_up() == [wire.Ping(BARRIER)]


def test_the_next_server_is_told_of_the_adapters() -> None:
    traces = EngineTraces()
    assert traces.greeting() == []
    traces.note_event(wire.ResidencyChanged({"a": "hot", "b": "warm"}))
    traces.note_event(wire.ResidencyChanged({"b": "cold", "c": "cold"}))
    traces.note_event(wire.Warming(True))
    assert traces.greeting() == [wire.ResidencyChanged({"a": "hot"}), wire.Warming(True)]
    traces.note_command(wire.Add(ask("x")))
    assert traces.forget() == 1
    assert (traces.greeting(), traces.is_clean) == ([], True)
