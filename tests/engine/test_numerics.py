"""The promise of the same bits, where it can be given, and the numerical build."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from loraplex.adapters.errors import LoraplexError
from loraplex.engine import numerics
from loraplex.engine.numerics import numerical_build
from loraplex.kernels.backend import make_kernels
from loraplex.kernels.linear import numba_dense
from loraplex.kernels.weight_form import WeightForm
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, save_tiny
from support.models.loading import plan_model

SIZES = {
    "kv_cache_memory": 1 << 20,
    "adapter_memory": 4 << 20,
    "adapter_cpu_memory": 4 << 20,
    "num_threads": 1,
}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), FAMILIES["llama-biases"])


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), OTHERS["granite"])


def obstacle(backend, dtype=torch.float32, *, asked=False):
    kernels = make_kernels(backend, torch.device("cpu"))
    return kernels.obstacle_to_same_bits(dtype, asked) or ""


def test_kernels_that_keep_the_promise(monkeypatch):
    assert not obstacle("triton", asked=True)
    assert "--batch-invariant is off" in obstacle("triton")
    for asked in (True, False):
        assert "torch's kernels" in obstacle("torch", asked=asked)
    for has_tiles in (False, True):
        features = {"avx2", "avx512f", "avx512bf16"} | ({"amx-bf16"} if has_tiles else set())
        monkeypatch.setattr(numba_dense, "host_features", lambda found=features: found)
        assert not obstacle("numba", torch.bfloat16)
        assert bool(obstacle("numba", torch.float16)) is has_tiles
        assert not obstacle("numba", torch.float16, asked=True)
    assert "oneDNN multiplies in float16" in obstacle("numba", torch.float16)
    monkeypatch.setattr(numba_dense, "host_features", lambda: {"neon"})
    assert "oneDNN multiplies in bfloat16" in obstacle("numba", torch.bfloat16, asked=True)


def test_a_model_that_cannot_keep_it_is_refused_in_one_line_and_warned_of(granite, llama, tmp_path, caplog):
    with pytest.raises(
        LoraplexError, match=r"^--batch-invariant: granite runs through transformers"
    ) as caught:
        LocalEngine(granite, tmp_path / "a", batch_invariant=True, **SIZES)
    assert "\n" not in caught.value.message
    with pytest.raises(LoraplexError, match=r"^--batch-invariant: torch's kernels") as caught:
        LocalEngine(llama, tmp_path / "b", batch_invariant=True, kernels="torch", **SIZES)
    assert "\n" not in caught.value.message
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(granite, tmp_path / "c", **SIZES)
    assert not engine.built.info.same_bits
    engine.close()
    assert "answers may depend on what is computed beside them: granite runs through" in caplog.text


def test_a_family_on_a_cpu_keeps_it_always(llama, tmp_path, caplog):
    found = []
    for number, asked in enumerate((False, True)):
        engine = LocalEngine(llama, tmp_path / str(number), batch_invariant=asked, dtype="float32", **SIZES)
        assert engine.built.info.same_bits
        found.append(engine.built.info.numerics)
        engine.close()
    assert "answers may depend" not in caplog.text
    # The option changes nothing there.
    assert found[0] == found[1] != ""


def test_the_build_is_the_same_for_the_same_and_another_for_whatever_changes_bits(
    llama, granite, monkeypatch
):
    plan = plan_model(llama, "cpu", "float32", kernels="torch")

    def build(backend="torch", of=plan, kv="auto", activations="", library="", **changed):
        kernels = make_kernels(backend, torch.device("cpu"), **changed)
        changed_plan = replace(
            of,
            kernels=kernels,
            obstacle=kernels.obstacle_to_same_bits(of.dtype, kernels.batch_invariant),
            settings=replace(of.settings, kv_cache_dtype=kv),
            linears=replace(of.linears, stored=WeightForm("groups", 4, 32, activations)),
        )
        return numerical_build(changed_plan, library)

    first = build()
    assert build(of=plan_model(llama, "cpu", "float32", kernels="torch")) == first
    others = [
        build("numba"),
        build("triton"),
        build(kv="int8"),
        build(activations="int8"),
        build(library="humming-kernels 0.1.19"),
        build(library="humming-kernels 0.1.20"),
        build("triton", batch_invariant=True),
        build(of=plan_model(granite, "cpu", "float32")),
        build(of=replace(plan, spec=replace(plan.spec, logits_softcap=30.0))),
    ]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    others.append(build())
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        others.append(build())
        # These kernels' sums do not depend on it.
        assert build("numba") == others[0]
    with monkeypatch.context() as patch:
        patch.setattr(numerics, "version", lambda name: "0.0" if name == "torch" else "1")
        others.append(build())
    with monkeypatch.context() as patch:
        patch.setattr(numerics, "_digest", lambda package: "another source")
        others.append(build())
    assert build() == first
    assert len({first, *others}) == len(others) + 1
