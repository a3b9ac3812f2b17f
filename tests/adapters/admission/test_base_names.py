"""Which names in adapters mean the base that is served: copies of it in other forms and places, and no other model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.base_names import names_base
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, admit
from support.adapters.drafts import draft_adapter, write_base

HASH = "c291d6fce4804a1d39305f388dd32897d1f7acc4"
BASE = "/srv/models/Llama-3.2-1B-Instruct"

SAME = [
    BASE,
    "Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct/",
    "./models/llama-3.2-1b-instruct//",
    "meta-llama/Meta-Llama-3.2-1B-Instruct",
    "unsloth/Llama-3.2-1B-Instruct",
    "unsloth/llama-3.2-1b-instruct-bnb-4bit",
    "unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit",
    "someone/Llama-3.2-1B-Instruct-GPTQ",
    "someone/Llama-3.2-1B-Instruct-GPTQ-Int4",
    "someone/Llama-3.2-1B-Instruct-GPTQ-4bit-128g",
    "someone/Llama-3.2-1B-Instruct-AWQ",
    "hugging-quants/Llama-3.2-1B-Instruct-AWQ-INT4",
    "someone/Llama-3.2-1B-Instruct-Int8",
    "neuralmagic/Llama-3.2-1B-Instruct-quantized.w8a8",
    "neuralmagic/Llama-3.2-1B-Instruct-FP8-dynamic",
    "nvidia/Llama-3.2-1B-Instruct-NVFP4",
    "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "/data/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
    "/data/Llama-3.2-1B-Instruct.Q8_0.gguf",
    "/data/Llama-3.2-1B-Instruct-IQ4_XS.gguf",
    "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "mlx-community/Llama-3.2-1B-Instruct-bf16",
    "turboderp/Llama-3.2-1B-Instruct-exl2",
    "someone/Llama-3.2-1B-Instruct_4_bit",
    "someone/Llama-3.2-1B-Instruct-hf",
    f"/srv/cache/huggingface/hub/models--meta-llama--Llama-3.2-1B-Instruct/snapshots/{HASH}",
    f"/srv/cache/huggingface/hub/models--unsloth--llama-3.2-1b-instruct-bnb-4bit/snapshots/{HASH}/",
    "/srv/cache/huggingface/hub/models--Llama-3.2-1B-Instruct",
    "/mnt/workspace/.cache/modelscope/hub/models/LLM-Research/Llama-3___2-1B-Instruct",
    "C:\\Users\\me\\models\\Llama-3.2-1B-Instruct\\",
]
OTHER = [
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-1B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct-Vision",
    "meta-llama/Llama-3.2-1B-Instruct-QLORA_INT4_EO8",
    "someone/Llama-3.2-1B-Instruct-abliterated",
    "someone/Llama-3.2-1B-Instruct-sft-bnb-4bit",
    "someone/my-Llama-3.2-1B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    f"/srv/cache/huggingface/hub/models--meta-llama--Llama-3.2-1B/snapshots/{HASH}",
    f"/srv/cache/{HASH}",
    "Llama-3.2-1B-Instruct/checkpoint-500",
    "/",
    "..",
    "4bit",
    "bnb-4bit",
    "x" * 100_000,
    "-" * 100_000,
    "4-" * 100_000,
    "a/" * 100_000,
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


@pytest.mark.parametrize("name", SAME)
def test_a_copy_of_the_base_is_the_base(name: str, base: BaseSpec) -> None:
    assert names_base(name, dataclasses.replace(base, model_dir=BASE))


@pytest.mark.parametrize("name", OTHER, ids=lambda name: name[:60])
def test_another_model_is_another(name: str, base: BaseSpec) -> None:
    assert not names_base(name, dataclasses.replace(base, model_dir=BASE))


def test_the_base_may_lie_in_a_hub_s_cache(base: BaseSpec) -> None:
    served = dataclasses.replace(
        base, model_dir=f"/cache/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/{HASH}"
    )
    assert names_base("Qwen/Qwen2.5-0.5B-Instruct", served)
    assert names_base("unsloth/Qwen2.5-0.5B-Instruct-bnb-4bit", served)
    assert not names_base(HASH, served)


def test_a_base_goes_by_the_names_in_its_config_too(tmp_path: Path) -> None:
    directory = write_base(tmp_path / "Tiny-1B", ARCH)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"_name_or_path": "Org/Other"}))
    served = load_base_spec(directory)
    assert [names_base(name, served) for name in ("Tiny-1B", "other", "org")] == [True, True, False]


@pytest.mark.parametrize(("named", "ok"), [("org/BASE-bnb-4bit", True), ("org/BASE-2", False)])
def test_the_report_warns_of_another_model_alone(
    named: str, ok: bool, base: BaseSpec, tmp_path: Path
) -> None:
    own = Path(base.model_dir).name
    files = draft_adapter(ARCH, base_model_name_or_path=named.replace("BASE", own)).write(tmp_path)
    checks = {check["name"]: check["ok"] for check in admit(files, base).report["checks"]}
    assert checks["base_name"] is ok
