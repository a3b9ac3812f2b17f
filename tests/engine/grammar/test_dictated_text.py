"""Long texts that a grammar dictates, through a real engine with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.engine.types import EngineRequest, SamplingParams
from support.engine.grammars import regex_case, save_byte_model, text_of
from support.engine.local_engine import LocalEngine

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=[0, 1], ids=["lookahead 0", "lookahead 1"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    folder = tmp_path_factory.mktemp("engine")
    model_dir = save_byte_model(folder / "model", max_position_embeddings=2048, num_hidden_layers=1)
    engine = LocalEngine(
        model_dir,
        folder / "work",
        dtype="float32",
        kernels="torch",
        lookahead=request.param,
        max_model_len=1200,
        max_num_seqs=8,
        kv_cache_memory=8 << 20,
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    yield engine
    engine.close()


def ask(engine: LocalEngine, name: str, grammar: str, **sampling: int) -> None:
    params = SamplingParams(**{"max_tokens": 1190, "seed": 7, **sampling})
    engine.core.add_request(EngineRequest(name, "acme", (65, 66), params, grammar=grammar))


def test_it_comes_whole(engine: LocalEngine) -> None:
    """In windows, whether its tokens are forced or, for their log probabilities, drawn one by one."""
    text = "".join(chr(97 + place * place % 26) for place in range(1100))
    case = regex_case(f"[xy]{text}[ab]{text[:60]}")
    ask(engine, "forced", case.grammar)
    ask(engine, "scored", case.grammar, logprobs=0, seed=8)
    engine.run()
    for name in ("forced", "scored"):
        assert case.matches(text_of(engine.tokens(name)))


def test_behind_many_tokens_it_may_not_be_too_long(engine: LocalEngine) -> None:
    """Where no trial sees it. No request but those with this grammar ends."""
    hidden = f'start: /[ab]{{40}}/ "{"c" * 9000}"'
    ask(engine, "hidden", hidden)
    ask(engine, "other", regex_case("[a-z]{60}").grammar)
    engine.run()
    end = engine.events["hidden"][-1]
    assert end.error is not None
    assert (end.error.code, "dictates 9000 bytes" in end.error.message) == ("grammar_failed", True)
    assert engine.events["other"][-1].finish_reason == "stop"
    ask(engine, "again", hidden)
    engine.run()
    again = engine.events["again"][-1]
    assert again.error is not None
    assert again.error.code == "grammar_failed"
    assert [event.token_ids for event in engine.events["again"]] == [()]
