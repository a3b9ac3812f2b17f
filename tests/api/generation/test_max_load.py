"""`x-loraplex-max-load-ms`: a client that does not wait for an adapter's load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane

HEADER = "x-loraplex-max-load-ms"
KEY = {"Authorization": "Bearer lpx_acme"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path_factory.mktemp("max-load")) as plane:
        yield plane


@pytest.fixture
def plane(shared: DataPlane) -> Iterator[DataPlane]:
    shared.reset()
    yield shared
    shared.settle_all()


def ask(plane: DataPlane, value: str, route: str = "completions", **body: Any) -> httpx.Response:
    body = {"model": BASE, "prompt": "xyz"} | body
    return plane.http.post(f"{plane.url}/v1/{route}", json=body, headers=KEY | {HEADER: value})


@pytest.mark.parametrize("value", ["", "-1", "1.5", "soon", "86400001", "9" * 5000, "+5", "1 2"])
def test_invalid_milliseconds_are_refused_by_name(plane: DataPlane, value: str) -> None:
    answer = ask(plane, value)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("invalid_value", HEADER)
    assert "from 0 to" in answer.json()["error"]["message"]
    assert plane.engine.requests == []


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.0), ("1500", 1.5)])
def test_the_engine_is_told_of_every_choice(plane: DataPlane, value: str, seconds: float) -> None:
    assert ask(plane, value, n=2).status_code == 200
    assert [request.max_load for request in plane.engine.requests] == [seconds, seconds]


def test_without_it_an_adapter_is_waited_for(plane: DataPlane) -> None:
    plane.http.post(f"{plane.url}/v1/completions", json={"model": BASE, "prompt": "x"}, headers=KEY)
    assert plane.engine.requests[-1].max_load is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_refusal_has_the_time_after_which_it_is_worth_trying_again(
    plane: DataPlane, stream: bool
) -> None:
    plane.engine.script(
        Reply(error=("adapter_unavailable", "it is being loaded"), refused=True, retry_after_s=2.3)
    )
    answer = ask(plane, "50", stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["code"] == "adapter_unavailable"


def test_anthropics_route_has_it_in_its_own_shape(plane: DataPlane) -> None:
    plane.engine.script(
        Reply(error=("adapter_unavailable", "it is being loaded"), refused=True, retry_after_s=2.0)
    )
    body = {"model": BASE, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    headers = {"x-api-key": "lpx_acme", "anthropic-version": "2023-06-01", HEADER: "50"}
    answer = plane.http.post(f"{plane.url}/v1/messages", json=body, headers=headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["type"] == "error"
    refused = plane.http.post(f"{plane.url}/v1/messages", json=body, headers=headers | {HEADER: "soon"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert HEADER in refused.json()["error"]["message"]
