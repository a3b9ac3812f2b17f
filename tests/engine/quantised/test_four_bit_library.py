"""A checkpoint of 4 bits whose linears humming-kernels multiplies: answers, reports, and a start that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.linear import humming
from support.engine.local_engine import LocalEngine
from support.kernels.fake_humming import install_fake
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import plan_model
from support.models.quantised_formats import write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 1}
MEMORY = {"kv_cache_memory": 1 << 20, "adapter_memory": 8 << 20, "adapter_cpu_memory": 8 << 20}
CUDA = torch.device("cuda")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Choose the library as on a GPU, with weights in the host's memory."""
    asked = humming.obstacle_to
    monkeypatch.setattr(
        humming,
        "obstacle_to",
        lambda device, *, batch_invariant: asked(CUDA, batch_invariant=batch_invariant),
    )
    return install_fake(monkeypatch, tmp_path / "site")


def engine_of(made: Path, work: Path, **settings: Any) -> LocalEngine:
    given = {"kernels": "triton", "dtype": "float16", "num_threads": 1, "max_model_len": 32, "lookahead": 1}
    return LocalEngine(made, work, **given | MEMORY | settings)


def write(tmp_path: Path) -> Path:
    return write_quantised(
        save_tiny(tmp_path / "base", FAMILIES["llama"] | SIZES), tmp_path, "compressed int4"
    )[0]


@pytest.mark.slow
def test_answers_are_those_of_triton_and_reports_name_the_library(library: Any, tmp_path: Path) -> None:
    made, found = write(tmp_path), []
    for invariant in (True, False):
        engine = engine_of(made, tmp_path / f"invariant {invariant}", batch_invariant=invariant)
        engine.add("r", range(3, 24), max_tokens=1, logprobs=0, prompt_logprobs=0)
        engine.run()
        scores = join_scores(
            [event.scores for event in engine.events["r"] if event.scores is not None]
        ).prompt
        assert scores is not None
        found.append((engine.built.info, torch.frombuffer(bytearray(scores.values), dtype=torch.float32)))
        engine.close()
    (triton, want), (other, got) = found
    assert (triton.four_bit_library, other.four_bit_library) == ("", "humming-kernels 0.1.19")
    assert triton.numerics != other.numerics
    assert other.memory.weights == pytest.approx(triton.memory.weights, rel=0.01)
    assert len(library.made) == 4
    assert all(layer.calls > 1 for layer in library.made)
    assert (got - want).abs().max() < 0.02


def test_a_start_whose_library_fails_says_what_to_do(library: Any, tmp_path: Path) -> None:
    library.fails = RuntimeError("no kernel image is available")
    with pytest.raises(ModelUnsupported, match=r"q_proj.*no kernel image .*pip uninstall humming-kernels"):
        engine_of(write(tmp_path), tmp_path / "work")


def test_doctor_says_what_multiplies(library: Any, tmp_path: Path) -> None:
    made = write(tmp_path)
    told = plan_model(made, "cpu", "float16", kernels="triton").explain()
    assert told.endswith(", two codes of 4 bits in a byte, by humming-kernels 0.1.19 where it has their form")
    told = plan_model(made, "cpu", "float16", kernels="triton", batch_invariant=True).explain()
    assert told.endswith(", by Triton, since humming-kernels does not keep a row's bits")
