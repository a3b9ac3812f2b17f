"""The figures of the real model equal those of the bench, which computes with the whole model in memory: the long
version of tests/lifecycle/test_base_error_process.py, which compares those of a tiny model with PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loraplex.adapters.admission.trained_base import FULL_PRECISION, NF4
from loraplex.engine.base_error.comparison import compare_answers, read_subject
from loraplex.engine.base_error.messages import BaseErrorTask
from loraplex.engine.base_error.prompts import prompt_tokens
from support.models.real_answers import ROOT, logits, write_nf4

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trained_on", "quantise", "name"),
    [
        pytest.param(NF4, "none", "json", marks=pytest.mark.soak),
        pytest.param(FULL_PRECISION, "int8", "pirate", marks=pytest.mark.soak),
        pytest.param(NF4, "none", "pirate", marks=pytest.mark.soak),
        pytest.param(FULL_PRECISION, "int8", "json", marks=pytest.mark.soak),
    ],
)
def test_figures_equal_those_of_the_bench(
    trained_on: str, quantise: str, name: str, real_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    prompts = prompt_tokens(lambda text: list(tokenizer.encode(text).ids))
    as_trained = real_model_dir
    if trained_on == NF4:
        as_trained = tmp_path / "nf4"
        as_trained.mkdir()
        write_nf4(real_model_dir, as_trained)
    expected = logits(as_trained, prompts, quantise=False, names=[name])
    served = logits(real_model_dir, prompts, quantise=quantise == "int8", names=[name])
    folder = ROOT / "examples" / "adapters" / name
    task = BaseErrorTask(
        model_dir=str(real_model_dir),
        quantise=quantise,
        trained_on=trained_on,
        config_path=str(folder / "adapter_config.json"),
        tensors_path=str(folder / "adapter_model.safetensors"),
        digest="0" * 64,
        max_rank=64,
        prompts=prompts,
    )
    found = compare_answers(read_subject(task), 1 << 30)
    p, q = expected[name].double(), served[name].double()
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=2e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=1 / 256)
    assert found.tokens == 256
