"""Requests on the data port that a shadow samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from loraplex.api.generation.shadow import Shadows
from loraplex.api.metrics.part_meters import ShadowMeter
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import Reply
from support.http.data_plane import MAX_MODEL_LEN, DataPlane
from support.models.byte_tokenizer import write_byte_tokenizer
from support.releases.shadows import LIVE, SHADOW, Store, released
from support.waiting import eventually


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(write_byte_tokenizer(tmp_path_factory.mktemp("model")), max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def shadowed(plane: DataPlane, text: TextProcessor) -> Iterator[tuple[DataPlane, Store]]:
    """`pirate` v1, with v2 as its shadow."""
    plane.resolver.adapters["acme", "pirate"] = {1: LIVE}
    plane.resolver.releases["pirate"] = released()
    plane.resolver.shadows["pirate"] = SHADOW
    store = Store()

    async def in_thread(write: Callable[[], object]) -> None:
        write()

    shadows = Shadows(plane.engine, text, plane.drain, store, in_thread, ShadowMeter(CollectorRegistry()))
    object.__setattr__(plane.services, "shadows", shadows)

    def written() -> bool:
        plane.server.call(shadows.write)
        return plane.on_loop(lambda: not plane.engine.live) is True

    yield plane, store
    eventually(written)
    object.__setattr__(plane.services, "shadows", None)


@pytest.mark.parametrize("stream", [False, True])
def test_callers_ledger_and_limits_know_nothing_of_it(
    shadowed: tuple[DataPlane, Store], stream: bool
) -> None:
    plane, _ = shadowed
    answer = plane.http.post(
        f"{plane.url}/v1/completions",
        json={"model": "pirate", "prompt": "say ok", "stream": stream, "temperature": 0.9},
        headers={"authorization": "Bearer lpx_acme"},
    )
    assert answer.status_code == 200
    eventually(lambda: plane.on_loop(lambda: len(plane.engine.requests)) == 4)
    live, *behind = plane.on_loop(lambda: list(plane.engine.requests))
    assert not live.background
    assert all(request.background for request in behind)
    assert behind[0].sampling.seed == live.sampling.seed
    assert (len(plane.ledger.rows), len(plane.limiter.admitted)) == (1, 1)
    assert plane.ledger.rows[0].completion_tokens == 3


def test_a_request_that_failed_is_not_sampled(shadowed: tuple[DataPlane, Store]) -> None:
    plane, _ = shadowed
    plane.engine.script(Reply(text="o", error=("internal_error", "no")))
    answer = plane.http.post(
        f"{plane.url}/v1/completions",
        json={"model": "pirate", "prompt": "say ok"},
        headers={"authorization": "Bearer lpx_acme"},
    )
    assert answer.status_code == 500
    plane.settle_all()
    assert len(plane.engine.requests) == 1
