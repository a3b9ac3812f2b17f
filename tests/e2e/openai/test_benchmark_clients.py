"""guidellm and lm-eval, as they are shipped, against the whole product."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.clients import guidellm, lm_eval
from support.clients.outside_clients import skip_unless_installed
from support.servers.live_server import EXAMPLE_ADAPTERS, SERVED_NAME, Shop

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "profile", "backend"),
    [
        pytest.param("pirate", "kind=synchronous", {}, id="chat, streamed"),
        pytest.param(SERVED_NAME, "kind=concurrent,streams=2", {}, id="base, two at a time"),
        pytest.param("pirate", "kind=synchronous", {"request_format": "/v1/completions"}, id="completions"),
        pytest.param("pirate", "kind=synchronous", {"stream": "false"}, id="not streamed"),
        pytest.param(None, "kind=synchronous", {}, id="the first of the models"),
    ],
)
def test_guidellm_gets_every_answer_and_the_true_counts(
    real: Shop, real_model_dir: Path, tmp_path: Path, model: str | None, profile: str, backend: dict[str, str]
) -> None:
    skip_unless_installed(guidellm.NAME)
    url = real.server.data_url
    done = guidellm.benchmark(url, real.key, model, real_model_dir, tmp_path, profile=profile, **backend)
    assert (done.successful, done.errored) == (guidellm.REQUESTS, 0), done
    assert done.output_tokens == guidellm.REQUESTS * guidellm.OUTPUT_TOKENS
    assert done.prompt_tokens >= guidellm.REQUESTS * guidellm.PROMPT_TOKENS


@pytest.mark.parametrize("adapter", [None, "pirate"])
def test_lm_eval_gets_the_likelihoods_of_transformers_and_peft(
    real: Shop, real_model_dir: Path, tmp_path: Path, adapter: str | None
) -> None:
    skip_unless_installed(lm_eval.NAME)
    model = adapter or SERVED_NAME
    completions = {"base_url": f"{real.server.data_url}/v1/completions", "tokenizer": real_model_dir}
    tasks = list(lm_eval.TASKS)
    served = lm_eval.evaluate(
        tmp_path / "served", "local-completions", {"model": model, **completions}, tasks, key=real.key
    )
    many = lm_eval.evaluate(
        tmp_path / "many",
        "local-completions",
        {"model": model, **completions, "num_concurrent": 4},
        tasks,
        "--batch_size",
        "4",
        key=real.key,
    )
    peft: dict[str, Any] = {"peft": EXAMPLE_ADAPTERS / adapter} if adapter else {}
    own = lm_eval.evaluate(
        tmp_path / "own",
        "hf",
        {"pretrained": real_model_dir, "dtype": "float32", "device": "cpu", **peft},
        tasks,
    )
    for told in (served, many):
        for mine, theirs in zip(told[lm_eval.CHOICE], own[lm_eval.CHOICE], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
            assert all(math.isfinite(value) and value < 0 for value in mine)
        assert told[lm_eval.ROLLING] == pytest.approx(own[lm_eval.ROLLING], abs=1e-3)
        assert told[lm_eval.GENERATE] == own[lm_eval.GENERATE]


def test_lm_eval_holds_chats(real: Shop, tmp_path: Path) -> None:
    skip_unless_installed(lm_eval.NAME)
    told = {
        model: lm_eval.evaluate(
            tmp_path / model.replace("/", "-"),
            "local-chat-completions",
            {"model": model, "base_url": f"{real.server.data_url}/v1/chat/completions"},
            [lm_eval.GENERATE],
            "--apply_chat_template",
            key=real.key,
        )[lm_eval.GENERATE]
        for model in (SERVED_NAME, "pirate")
    }
    assert len(told["pirate"]) == len(lm_eval.DOCUMENTS)
    assert all(isinstance(answer, str) and answer for answers in told.values() for answer in answers)
    assert told["pirate"] != told[SERVED_NAME]
