"""The outputs of an adapter's sites, measured by a real engine: sound adapters are equal to the reference, and faults
that are planted in the loader are refused by their numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.numerics import TOLERANCE, NumbersVerdict, SiteOutputs
from loraplex.engine.execution.riders.site_probe import SiteProbe
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.types import MEASURE_STEPS, StepPlan, Usage
from support.adapters.loader_faults import (
    Plant,
    a_of_another_layer,
    exchange,
    ignored_magnitudes,
    scaling,
    transposed_b,
)
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.adapters.whole_reads import check_numbers
from support.engine.local_engine import LocalEngine
from support.kernels.triton_interpreter import repair_bfloat16
from support.models.checkpoints import FAMILIES, OTHERS, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("all", "many-ranks", "dora", "dora-head")}


@contextmanager
def engine_of(base: Path, work: Path, **options: Any) -> Iterator[LocalEngine]:
    given = {
        "kernels": "numba",
        "dtype": "bfloat16",
        "max_model_len": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 40,
        "kv_cache_memory": 4 << 20,
        "adapter_memory": 16 << 20,
        "adapter_cpu_memory": 16 << 20,
        "num_threads": 1,
    }
    engine = LocalEngine(base, work, **given | options)
    try:
        yield engine
    finally:
        engine.close()


def verdict(engine: LocalEngine, folder: Path, name: str) -> NumbersVerdict:
    engine.measure(name, engine.publish(folder, name=name))
    engine.run()
    files = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
    return check_numbers(*files, engine.base, engine.outputs(name))


class Models:
    """Tiny models with their adapters, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, dict[str, Path]]] = {}

    def __getitem__(self, family: str) -> tuple[Path, dict[str, Path]]:
        if family not in self._made:
            base = save_tiny(self._root / family / "base", (FAMILIES | OTHERS)[family])
            self._made[family] = base, save_adapters(base, self._root / family, CHOSEN)
        return self._made[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("family", "kernels", "dtype"),
    [
        ("llama-biases", "numba", "bfloat16"),
        ("phi3", "torch", "float16"),
        pytest.param("qwen3_next", "numba", "bfloat16", marks=pytest.mark.soak),
        pytest.param("qwen3_5_moe", "numba", "float32", marks=pytest.mark.soak),
        *(
            pytest.param(family, kernels, dtype, marks=pytest.mark.slow)
            for family in ("llama-biases", "qwen2", "gemma3", "phi3", "starcoder2")
            for kernels in ("numba", "torch")
            for dtype in ("float32", "float16", "bfloat16")
            if (kernels, dtype) != ("numba", "float16")
        ),
    ],
)
def test_sound_adapters_are_equal_to_the_reference(
    family: str, kernels: str, dtype: str, models: Models, tmp_path: Path
) -> None:
    base, adapters = models[family]
    with engine_of(base, tmp_path, kernels=kernels, dtype=dtype) as engine:
        for name, folder in adapters.items():
            found = verdict(engine, folder, name)
            assert found.ok, found.message
            assert found.report["max"] < TOLERANCE / 2
            assert found.report["dtype"] == dtype


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(("family", "dtype"), [("llama-biases", "float32"), ("gemma3", "bfloat16")])
def test_the_path_of_a_gpu_gives_the_same(
    family: str, dtype: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repair_bfloat16(monkeypatch)
    base, adapters = models[family]
    with engine_of(base, tmp_path, kernels="triton", dtype=dtype) as engine:
        for name in ("all", "dora-head"):
            found = verdict(engine, adapters[name], name)
            assert found.ok, found.message


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "scaling of all": (scaling(1.02), "all", ""),
    "scaling of one": (scaling(1.02, "1.mlp.up_proj"), "all", "1.mlp.up_proj"),
    "exchanged sites": (exchange(2, "gate_proj", "up_proj"), "all", "2.mlp."),
    "transposed B": (transposed_b(1, "v_proj"), "all", "1.self_attn.v_proj"),
    "A of another layer": (a_of_another_layer(0, "q_proj", 2), "all", "0.self_attn.q_proj"),
    "ignored magnitudes": (ignored_magnitudes, "dora", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("numba", "bfloat16"),
        pytest.param("torch", "float16", marks=pytest.mark.slow),
        pytest.param("torch", "float32", marks=pytest.mark.slow),
    ],
)
def test_faults_of_the_loader_are_refused_by_their_numbers(
    fault: str, kernels: str, dtype: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = models["llama-biases"]
    plant, name, where = FAULTS[fault]
    plant(monkeypatch)
    with engine_of(base, tmp_path, kernels=kernels, dtype=dtype) as engine:
        found = verdict(engine, adapters[name], name)
    assert found.report["verdict"] == "mismatch"
    assert found.report["max"] > 2 * TOLERANCE
    assert where in found.report["worst_module"]


def test_weights_whose_outputs_overflow_are_named_and_nobody_else_is_harmed(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = models["llama-biases"]
    with engine_of(base, tmp_path) as engine:
        engine.add("before", range(3, 40), max_tokens=12)
        engine.run()
        right = LoraSettings.rank_and_scaling

        def huge(self: LoraSettings, path: str, tensor_rank: int | None = None) -> tuple[int, float]:
            rank, found = right(self, path, tensor_rank)
            return rank, 1e38 if path.endswith("1.mlp.down_proj") else found

        monkeypatch.setattr(LoraSettings, "rank_and_scaling", huge)
        ref = engine.publish(adapters["all"], name="huge")
        engine.add("beside", range(3, 40), max_tokens=12)
        engine.measure("huge", ref)
        engine.run()
        outputs = engine.outputs("huge")
    finite = dict(zip(outputs.sites, outputs.finite, strict=True))
    assert [site for site, is_finite in finite.items() if not is_finite] == [(1, "down_proj")]
    assert engine.tokens("beside") == engine.tokens("before")


def test_weights_that_the_served_dtype_cannot_hold_are_not_loaded(models: Models, tmp_path: Path) -> None:
    base, adapters = models["llama-biases"]
    folder = tmp_path / "large"
    shutil.copytree(adapters["all"], folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.2.mlp.gate_proj.lora_B.weight"
    save_file({**tensors, name: tensors[name] * 1e20}, path)
    with engine_of(base, tmp_path, kernels="torch", dtype="float16") as engine:
        engine.measure("large", engine.publish(folder))
        engine.run()
        error = engine.events["large"][-1].error
        assert error is not None
        assert error.code == "adapter_unavailable"
        outputs = SiteOutputs("float16", (), b"", b"", error.message)
        found = check_numbers(folder / "adapter_config.json", path, engine.base, outputs)
    assert found.report["verdict"] == "overflow"
    assert found.report["worst_module"] == "model.layers.2.mlp.gate_proj"


def test_a_step_measures_a_part_and_the_others_go_on(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = models["llama-biases"]
    sites_of: list[int] = []
    right = SiteProbe._measure

    def counted(self: SiteProbe, asked: Any) -> Any:
        measured = right(self, asked)
        sites_of.append(len(measured.sites))
        return measured

    monkeypatch.setattr(SiteProbe, "_measure", counted)
    with engine_of(base, tmp_path) as engine:
        refs = {name: engine.publish(adapters[name], name=name) for name in ("all", "dora-head")}
        for name, ref in refs.items():
            engine.add(f"alone-{name}", range(5, 30), ref, max_tokens=20)
        engine.run()
        for name, ref in refs.items():
            engine.add(f"beside-{name}", range(5, 30), ref, max_tokens=20)
        engine.step()
        for name, ref in refs.items():
            engine.measure(f"measured-{name}", ref)
        engine.run()
        for name, folder in ((name, adapters[name]) for name in refs):
            assert engine.tokens(f"beside-{name}") == engine.tokens(f"alone-{name}")
            files = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
            assert check_numbers(*files, engine.base, engine.outputs(f"measured-{name}")).ok
        # All at once, they bring the same bits.
        engine.measure("again", refs["all"])
        engine.run()
        assert engine.outputs("again") == engine.outputs("measured-all")
    # Seven sites a layer, and a layer a step.
    assert max(sites_of) <= 7
    assert sum(sites_of) == 2 * 21 + 4


def test_rows_that_are_alike_are_equal_to_the_reference(models: Models, tmp_path: Path) -> None:
    """The sums of such rows are rounded alike, so their errors add up."""
    base, adapters = models["llama-biases"]
    folder = tmp_path / "alike"
    shutil.copytree(adapters["all"], folder)
    path = folder / "adapter_model.safetensors"
    alike = {
        name: torch.full_like(tensor, 0.3 if "lora_A" in name else 0.7)
        for name, tensor in load_file(path).items()
    }
    save_file(alike, path)
    with engine_of(base, tmp_path, dtype="float32") as engine:
        found = verdict(engine, folder, "alike")
    assert found.ok, found.message


def test_a_step_measures_one_version_and_each_has_its_turn(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = models["llama-biases"]
    right = SiteProbe._measure
    slots: list[int] = []

    def noted(self: SiteProbe, asked: Any) -> Any:
        slots.append(asked.slot)
        return right(self, asked)

    monkeypatch.setattr(SiteProbe, "_measure", noted)
    with engine_of(base, tmp_path) as engine:
        for name in CHOSEN:
            engine.measure(name, engine.publish(adapters[name], name=name, tenant=f"tenant-{name}"))
        while engine.core.has_work:
            before = len(slots)
            engine.step()
            assert len(slots) <= before + 1
        files = {name: (folder / "adapter_config.json", folder / "adapter_model.safetensors")
                 for name, folder in adapters.items()}  # fmt: skip
        for name in CHOSEN:
            assert check_numbers(*files[name], engine.base, engine.outputs(name)).ok
    # None was measured to its end before the others had begun.
    assert len(slots) == 8 * len(CHOSEN)
    assert len({*slots[: 2 * len(CHOSEN)]}) > 1


def test_a_tenant_that_always_waits_for_something_gets_its_version(models: Models, tmp_path: Path) -> None:
    base, adapters = models["llama-biases"]
    with engine_of(base, tmp_path, max_num_seqs=2) as engine:
        ref = engine.publish(adapters["all"])
        for number in range(40):
            engine.add(f"r{number}", range(5, 30), max_tokens=20)
        engine.step()
        engine.measure("measured", ref)
        while "measured" not in engine.events:
            engine.step()
        assert check_numbers(
            adapters["all"] / "adapter_config.json",
            adapters["all"] / "adapter_model.safetensors",
            engine.base,
            engine.outputs("measured"),
        ).ok
        ended = [name for name, events in engine.events.items() if events[-1].finish_reason]
        assert len(ended) < 20


def test_a_measurement_that_fails_ends_its_own_request_alone(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SiteProbe, asked: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(SiteProbe, "_measure", broken)
    base, adapters = models["llama-biases"]
    with engine_of(base, tmp_path) as engine:
        ref = engine.publish(adapters["all"])
        engine.add("beside", range(5, 30), ref, max_tokens=9)
        engine.measure("measured", ref)
        engine.run()
        assert len(engine.tokens("beside")) == 9
        (event,) = [event for event in engine.events["measured"] if event.finish_reason]
        assert event.error is not None
        assert event.error.code == "internal_error"
        assert event.measured is None


def test_a_measurement_takes_no_row_and_no_block(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = models["llama-biases"]
    plans: list[StepPlan] = []
    submit = ModelRunner.submit

    def noted(self: ModelRunner, plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(self, plan)

    monkeypatch.setattr(ModelRunner, "submit", noted)
    with engine_of(base, tmp_path) as engine:
        ref = engine.publish(adapters["all"])
        engine.measure("measured", ref)
        engine.run()
        assert [plan.scheduled for plan in plans] == [()] * MEASURE_STEPS
        assert [plan.measure and plan.measure.start for plan in plans] == [*range(MEASURE_STEPS)]
        (event,) = engine.events["measured"]
        assert event.usage == Usage(0, 0)
        assert engine.core.stats().num_kv_blocks_used == 0


def test_a_measurement_is_refused_where_the_queue_is_full(models: Models, tmp_path: Path) -> None:
    base, adapters = models["llama-biases"]
    with engine_of(base, tmp_path, max_waiting=2, max_num_seqs=1) as engine:
        ref = engine.publish(adapters["all"])
        for name in "abc":
            engine.add(name, range(5, 30), ref)
        engine.measure("measured", ref)
        engine.run()
        (event,) = engine.events["measured"]
        assert event.error is not None
        assert event.error.code == "server_overloaded"
