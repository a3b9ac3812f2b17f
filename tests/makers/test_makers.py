"""Checkpoints that the makers' own writers write, in their newest releases (`make makers`): each is served near the
model that it was made of, or refused in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.outline import examine_tensors
from support.clients.outside_clients import INSTALLED
from support.markdown import ROOT
from support.models.byte_tokenizer import write_byte_tokenizer
from support.models.checkpoints import PagedRun, reference_logits, save_tiny
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.soak

SIZES = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "pad_token_id": 258, "bos_token_id": 257, "eos_token_id": 256,
}  # fmt: skip
REFUSED = {
    "auto_round": {"own, a module of 8 bits": "'bits' 8, another than the other modules"},
    "gptqmodel": {
        "GPTQ, ordered by activation": "ordered by activation",
        "GPTQ, modules of 8 bits": "'bits' 8, another than the other modules",
        # GPTQModel 7.7 quantises a head with 8 bits, whatever `bits` says.
        "GPTQ, the head too": "gives 'lm_head' 'bits' 8, another",
    },
    "llmcompressor": {
        "NVFP4A16": "format 'nvfp4-pack-quantized' is not served",
        "MXFP4A16": "format 'mxfp4-pack-quantized' is not served",
    },
    "transformers": {
        "fp4": "4-bit type 'fp4' is not served",
        "hqq": "quantised by 'hqq' is not served",
        "quanto": "quantised by 'quanto' is not served",
        "torchao int8": "quantised by 'torchao' is not served",
    },
}
"""Kinds that are refused, with words of the refusal; all others are served."""
LEAST = {"auto_round": 10, "gptqmodel": 9, "llmcompressor": 8, "transformers": 4}
"""Kinds that each writer must have written, so that a changed interface is noticed."""
_LEAST_NEAR = 0.8
"""Cosine of the logits and the model's own. Codes of 4 bits over small random layers give 0.85, those of 8 bits 0.999;
codes read in another order give about 0."""
PROMPT = [*range(70, 100), 257, 10, 33]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("base") / "base", SIZES)
    write_byte_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # Tokens as texts alone: some makers' transformers read no others.
    flat = {name: value["content"] if isinstance(value, dict) else value for name, value in config.items()}
    path.write_text(json.dumps(flat))
    return folder


@pytest.mark.parametrize("maker", REFUSED)
def test_what_a_maker_writes_is_served_or_refused_in_one_sentence(
    maker: str, base: Path, tmp_path: Path
) -> None:
    python = INSTALLED / f"maker_{maker}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{maker} is not installed; 'make makers' installs it")
    done = subprocess.run(
        [str(python), str(ROOT / "tests/makers/scripts" / f"{maker}_writes.py"), str(base), str(tmp_path)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    told = "\n".join(line for line in done.stderr.splitlines() if "not written" in line)
    assert done.returncode == 0, done.stderr[-2000:]
    # AutoRound puts each into a folder of its own below.
    written = {path.relative_to(tmp_path).parts[0]: path.parent for path in tmp_path.rglob("config.json")}
    assert len(written) >= LEAST[maker], told
    (expected,) = reference_logits(base, [PROMPT])
    wrong = {}
    for name, folder in written.items():
        words = REFUSED[maker].get(name)
        try:
            examine_tensors(plan_model(folder))
            run = PagedRun(load_model(folder, "cpu", torch.float32, kernels="torch"), [PROMPT])
        except ModelUnsupported as error:
            is_right = words is not None and words in error.message and "\n" not in error.message
            found = error.message
        else:
            run.step({0: len(PROMPT)})
            near = torch.cosine_similarity(run.result(0).flatten(), expected.flatten(), dim=0).item()
            is_right, found = words is None and near > _LEAST_NEAR, f"served, and {near:.3f} near"
        print(f"{maker}, {name}: {found}")
        if not is_right:
            wrong[name] = found
    print(told)
    assert not wrong
