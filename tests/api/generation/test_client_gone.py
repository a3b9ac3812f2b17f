"""A request that is refused while its client hangs up: the client's own affair twice over, and no error of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from prometheus_client.parser import text_string_to_metric_families

from loraplex.api.errors import from_exception
from loraplex.api.metrics import EngineSnapshot
from loraplex.control.errors import InvalidValue, NeverFits, RateLimited
from loraplex.engine.reports import EngineStats
from support.http.data_plane import BASE, DataPlane, FakeLimiter, running_data_plane
from support.waiting import eventually


class Refusing(FakeLimiter):
    """Lets the request go no further before `held` is set, and then refuses it."""

    error: Exception

    async def reserve(self, request_id: str, caller: Any, **asked: Any) -> Any:
        self.asked += 1
        assert self.held is not None
        await self.held.wait()
        raise self.error


class KeptLog:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(fields)


@pytest.fixture
def access_log() -> KeptLog:
    return KeptLog()


@pytest.fixture
def own(tmp_path: Path, access_log: KeptLog) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path / "model", limiter=Refusing(), access_log=access_log) as running:
        yield running


def refused_after_hang_up(own: DataPlane, error: Exception) -> list[str]:
    """Events of the log, except the access log, of a request whose client goes before it is refused with `error`."""
    limiter = own.limiter
    assert isinstance(limiter, Refusing)
    limiter.error = error
    limiter.held = own.on_loop(asyncio.Event)
    body = json.dumps({"model": BASE, "prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Length: {len(body)}"
    with structlog.testing.capture_logs() as logs:
        with own.server.connect() as sock:
            sock.sendall(head.encode() + b"\r\n\r\n" + body)
            eventually(lambda: limiter.asked == 1)
        eventually(lambda: own.on_loop(lambda: not own.server.server.server_state.connections))
        own.on_loop(limiter.held.set)
        assert own.server.call(lambda: own.drain.wait_idle(60))
    return [entry["event"] for entry in logs]


@pytest.mark.parametrize(
    "error",
    [
        NeverFits("The prompt is too long.", param="messages"),
        RateLimited("Too many requests.", retry_after_s=3),
        InvalidValue("No."),
    ],
)
def test_a_refusal_that_nobody_reads_is_no_error(
    own: DataPlane, access_log: KeptLog, error: Exception
) -> None:
    assert refused_after_hang_up(own, error) == []
    eventually(lambda: len(access_log.lines) == 1)
    assert (access_log.lines[0]["status"], access_log.lines[0]["outcome"]) == (
        None,
        from_exception(error).code,
    )
    assert cut(own) == 1


def test_a_failure_of_ours_is_one_though_nobody_reads_it(own: DataPlane, access_log: KeptLog) -> None:
    assert refused_after_hang_up(own, RuntimeError("the limiter is broken")) == ["request_failed"]
    eventually(lambda: len(access_log.lines) == 1)
    assert access_log.lines[0]["outcome"] == "gone"


def cut(own: DataPlane) -> float:
    """`loraplex_streams_cut_total{reason="gone"}`."""
    text = own.metrics.render(EngineSnapshot(None, EngineStats(), (), True, 0)).decode()
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "loraplex_streams_cut_total"
    )
