"""Tests of the plan of a checkpoint: it is made once, and all commands report it alike."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.app.doctor.torch_checks import Questions, _answer
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.loading import load_model
from loraplex.engine.model.model_plan import ModelSettings
from loraplex.engine.model.outline import outline_model
from loraplex.kernels.weight_form import FLOATS, WeightForm
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, edit_config, save_tiny
from support.models.loading import plan_model
from support.models.quantised_formats import FORMATS, write_quantised
from support.servers.run_here import run_here

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "vocab_size": 160,
    "num_hidden_layers": 2,
}
MEMORY = {"kv_cache_memory": 8 << 20, "adapter_memory": 8 << 20, "adapter_cpu_memory": 8 << 20}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "base", FAMILIES["llama"] | SIZES)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose config transformers reads."""
    from transformers import AutoConfig

    found: list[Path] = []
    read = AutoConfig.from_pretrained

    def count(path: Path, **options: Any) -> Any:
        found.append(path)
        return read(path, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", count)
    return found


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_doctor_reads_a_config_once_and_says_what_the_engine_reports(
    family: str, readings: list[Path], tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", (FAMILIES | OTHERS)[family])
    told = _answer(
        Questions(
            device="cpu", dtype="auto", quantise="none", kv_cache_dtype="int8", kernels="numba", attention="auto",
            threads=1, max_model_len=0, batch_invariant=False, speculation="off", model_dir=str(base),
        )
    )  # fmt: skip
    assert len(readings) == 1
    assert told["untested"] == {"ok": ""}
    engine = LocalEngine(base, tmp_path, kernels="numba", kv_cache_dtype="int8", num_threads=1, **MEMORY)
    info = engine.built.info
    engine.close()
    words = told["model"]["ok"]
    assert f", attention {info.attention}" in words
    assert f", KV in {info.kv_cache_dtype}, " in words
    assert words.endswith(f", {info.dtype}")
    assert ("the same bits in every batch" in words) is info.same_bits
    assert {"fused": "on the fused decoder", "transformers": "through transformers"}[info.decoder] in words


def test_an_engine_reports_its_plan(llama: Path, tmp_path: Path) -> None:
    made, _ = write_quantised(llama, tmp_path, "gptq int4")
    engine = LocalEngine(made, tmp_path / "work", kernels="numba", num_threads=1, **MEMORY)
    info = engine.built.info
    engine.close()
    summary = asdict(plan_model(made, kernels="numba").summary)
    assert {name: getattr(info, name) for name in summary} == summary
    assert (info.stored_codes, info.activations) == ("gptq int4", "int8")


def test_settings_are_taken_by_name() -> None:
    config = EngineConfig(
        "model", "store", dtype="float16", max_model_len=7, quantise="int8", kv_cache_dtype="int8"
    )
    assert ModelSettings.of(config) == ModelSettings("float16", 7, "auto", "int8", "int8")


@pytest.mark.parametrize(
    ("name", "quantise", "kernels", "layer", "head"),
    [
        ("gptq int4", False, "numba", WeightForm("groups", 4, 32, "int8"), FLOATS),
        ("gptq int4", True, "numba", WeightForm("groups", 4, 32, "int8"), WeightForm("groups", 8, 64)),
        ("gptq int4", False, "torch", WeightForm("groups", 4, 32), FLOATS),
        ("fp8, blocks", False, "numba", FLOATS, FLOATS),
        ("fp8, blocks", True, "numba", WeightForm("groups", 8, 64), WeightForm("groups", 8, 64)),
    ],
)
def test_linears_have_one_form_each(
    name: str, quantise: bool, kernels: str, layer: WeightForm, head: WeightForm, llama: Path, tmp_path: Path
) -> None:
    made, _ = write_quantised(llama, tmp_path, name)
    plan = plan_model(made, kernels=kernels, quantise=quantise)
    names = [f"model.layers.1.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    assert plan.linears.form_of(names, 64) == layer
    assert plan.linears.form_of(["lm_head"], 64) == head
    planned = outline_model(plan).weight_bytes
    assert abs(planned - load_model(plan).weight_bytes) < 0.02 * planned


def test_what_a_start_refuses_is_not_planned(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "base", OTHERS["granite"])
    edit_config(path, quantization_config=FORMATS["gptq int4"].config)
    with pytest.raises(ModelUnsupported, match="a quantised checkpoint: granite runs through transformers"):
        plan_model(path)
    done = run_here("plan", "--model", str(path), "--gpu", "l4")
    assert done.code != 0
    assert "a quantised checkpoint: granite runs through transformers" in done.stderr


def test_a_plan_remarks_what_a_start_logs(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_model(llama, "cpu", torch.float32, kernels="torch")
    assert not caplog.text
    (remark,) = plan.remarks
    load_model(plan)
    assert remark in caplog.text
