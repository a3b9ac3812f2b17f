"""`loraplex plan`: what it says is what a start of the server allocates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.app.plan.devices import DEVICES
from loraplex.app.plan.memory import Wanted, divide_memory
from loraplex.app.plan.shapes import SHAPES, SOURCES
from loraplex.app.settings import Settings
from loraplex.engine.build import build_engine
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.outline import ModelOutline
from loraplex.engine.sizing import adapter_pages
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.linear.packed import PackedLinear
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import load_model, outline_model, plan_model
from support.servers.live_server import (
    LiveServer,
    checked,
    write_real_adapter,
    write_tiny_model,
)
from support.servers.run_here import run_here

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def plan(*arguments: str) -> dict[str, Any]:
    done = run_here("plan", *arguments, "--json")
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def outline_of(name: str, tmp_path: Path, **changes: object) -> ModelOutline:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return outline_model(tmp_path, CUDA, "auto")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_allocates_what_was_planned(
    kv_cache_dtype: Literal["auto", "int8"], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny", positions=4096)
    arguments = (
        "--model",
        str(model),
        "--gpu",
        "cpu",
        "--gpu-memory",
        "1300MiB",
        "--rank",
        "12",
        "--adapters",
        "5",
        "--kv-cache-dtype",
        kv_cache_dtype,
    )
    arguments += ("--context", "256", "--max-num-seqs", "4", "--dtype", "float32")
    without = plan(*arguments)
    found = plan(*arguments, "--kv-host-memory", "64MiB")
    settings = found["settings"]
    engine = build_engine(
        EngineConfig(
            model_path=settings["model"],
            artifact_dir=str(tmp_path / "artifacts"),
            device=settings["device"],
            dtype=settings["dtype"],
            kernels="torch",
            adapter_memory=mib(settings["adapter_memory"]),
            kv_cache_memory=mib(settings["kv_cache_memory"]),
            adapter_cpu_memory=mib(settings["adapter_cpu_memory"]),
            max_num_seqs=settings["max_num_seqs"],
            max_adapter_rank=settings["max_adapter_rank"],
            kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
            kv_host_memory=settings["kv_host_memory"],
        ),
        wake=lambda: None,
    )
    info = engine.info
    assert engine.core.stats().num_kv_host_blocks == found["kv_host_blocks"] > 0
    engine.close()
    assert (info.arena_pages, info.arena_page_bytes) == (found["arena_pages"], found["page"])
    assert (info.num_kv_blocks, info.kv_bytes) == (found["kv_blocks"], found["kv"])
    assert info.kv_cache_dtype == {"auto": "float32", "int8": "int8"}[kv_cache_dtype]
    assert info.max_model_len == found["max_model_len"]
    assert found["resident"] >= 5
    assert found["kv"] + found["free"] + (64 << 20) == without["kv"] + without["free"]


def test_windows_are_planned_with_host_memory(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", FAMILIES["gemma3"])
    asked = ["--gpu", "cpu", "--gpu-memory", "1300MiB", "--adapters", "1", "--context", "128"]
    found = plan("--model", str(model), *asked, "--kv-host-memory", "32MiB")
    assert found["kv_host_blocks"] == (32 << 20) // found["block"]
    assert found["kv_host_state"] == 0


def test_states_and_windows_are_planned_as_an_engine_has_them(tmp_path: Path) -> None:
    """With heads as large as a 0.8B's, in one layer of three."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = save_tiny(tmp_path / "base", FAMILIES["qwen3_5-2"] | sizes)
    asked = [
        "--gpu",
        "cpu",
        "--gpu-memory",
        "1300MiB",
        "--adapters",
        "1",
        "--context",
        "128",
        "--max-num-seqs",
        "4",
    ]
    least = plan("--model", str(model), *asked, "--dtype", "float32")
    chosen, kept = least["states"], least["settings"]["kv_cache_memory"]
    assert least["kv_setting"] == mib(kept) > least["kv"] + (1 << 20)
    small = run_here("plan", "--model", str(model), *asked, "--dtype", "float32").stdout
    assert f"; 4 sequences use no more of the {mib(kept) >> 20}.0 MiB that are set" in small
    wrong = run_here("plan", "--model", str(model), *asked, "--state-cache", "much")
    assert "--state-cache 'much'" in wrong.stderr
    refused = run_here("plan", "--model", str(model), *asked, "--kv-host-memory", "256KiB")
    assert "--kv-host-memory of 262144 bytes, half of it for one tenant at most, holds" in refused.stderr
    asked += ["--state-cache", "16MiB", "--kv-host-memory", "32MiB"]
    found = plan("--model", str(model), *asked, "--dtype", "float32")
    engine = build_engine(
        EngineConfig(
            str(model), str(tmp_path / "artifacts"), device="cpu", dtype="float32", kernels="torch", max_num_seqs=4,
            kv_cache_memory=mib(found["settings"]["kv_cache_memory"]), adapter_memory=1 << 20,
            adapter_cpu_memory=1 << 20, state_cache=found["settings"]["state_cache"],
            kv_host_memory=found["settings"]["kv_host_memory"],
        ),
        wake=lambda: None,
    )  # fmt: skip
    info = engine.info
    assert engine.core.stats().num_kv_host_blocks == found["kv_host_blocks"]
    assert found["kv_host_state"] == -(-info.state_bytes // info.kv_host_block_bytes) > 1
    engine.close()
    assert (info.num_states, info.num_windows) == (found["states"], found["windows"])
    assert (info.state_bytes, info.window_bytes) == (found["state"], found["window"])
    assert found["states"] > chosen > found["windows"] == 4
    assert (found["states"] - 4) * found["state"] <= 16 << 20
    told = run_here("plan", "--model", str(model), *asked, "--dtype", "float32").stdout
    assert f"{found['states']} states, " in told
    assert f"{found['states'] - 4} of them for prefixes; 4 windows, " in told
    assert f"blocks of 16 tokens more, or states, {found['kv_host_state']} blocks each" in told
    assert "states of 0.3 MiB and windows of 0.1 MiB" in plan_model(model).explain()


def mib(setting: str) -> int:
    assert setting.endswith("MiB")
    return int(setting.removesuffix("MiB")) << 20


def test_weights_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    loaded = load_model(model, CPU, "float32", kernels="torch")
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(loaded)}
    outline = outline_model(model, CPU, "float32")
    assert outline.weight_bytes == sum(held.values())
    assert outline.site_groups == loaded.site_groups
    assert outline.head_group == loaded.head_group
    assert outline.shape == loaded.shape
    assert outline_model(model, CUDA, "bfloat16").weight_bytes * 2 == outline.weight_bytes


_NO_WEIGHTS = ("_inv_freqs", "_cos_sin_tables", "_ops", "_spec")


def tensors_of(value: Any, depth: int = 6) -> list[torch.Tensor]:
    """Of an object and what it holds, without the frequencies of RoPE and what is computed from them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | int | float | bool):
        return []
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in tensors_of(one, depth - 1)]
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    parts = [getattr(value, name) for name in names if name not in _NO_WEIGHTS]
    held = [one for one in parts if isinstance(one, PackedLinear) or not callable(one)]
    return [tensor for one in held for tensor in tensors_of(one, depth - 1)]


@pytest.mark.slow
def test_a_started_server_has_what_was_planned(real_model_dir: Path, tmp_path: Path) -> None:
    """The real model with an adapter of the planned rank on every linear of its layers."""
    found = plan("--model", str(real_model_dir), "--gpu", "cpu", "--gpu-memory", "3GiB", "--adapters", "3")
    settings = dict(found["settings"])
    with LiveServer(settings.pop("model"), tmp_path / "data", **settings) as server:
        engine = server.engine()["info"]
        assert engine["arena_pages"] == found["arena_pages"]
        assert engine["arena_page_bytes"] == found["page"]
        assert engine["num_kv_blocks"] == found["kv_blocks"]
        assert engine["max_model_len"] == found["max_model_len"]
        server.create_tenant("acme")
        key = server.create_key("acme")
        for number in range(3):
            sites = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            folder = write_real_adapter(tmp_path / f"a{number}", rank=16, targets=sites, seed=number)
            server.upload("acme", f"a{number}", folder)
            with server.client(key) as client:
                checked(
                    client.post(
                        "/v1/completions", json={"model": f"a{number}", "prompt": "x", "max_tokens": 1}
                    )
                )
        used = server.stats()["num_arena_pages_used"]
        assert used * found["page"] == 3 * found["adapter"]
        pid = server.engine_pid()
        assert pid is not None
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10
        # Pools are touched as they are used: the weights are there, the rest of the allowance is not exceeded.
        assert found["weights"] <= resident <= found["weights"] + found["reserve"] + 3 * 2 * found["adapter"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_model_has_its_plan(name: str) -> None:
    found = (
        plan("--model", name, "--gpu", "h200", "--adapters", "16", "--rank", "8")
        if name != "llama-3.1-70b"
        else {}
    )
    assert name in SOURCES
    if found:
        assert found["resident"] >= 16
        parts = ("weights", "arena", "kv", "activations", "reserve", "free")
        assert sum(found[part] for part in parts) == found["total"]
        assert found["free"] >= 0
        assert found["speed"][0]["rows"] == 1


def test_known_sizes_of_llama_8b(tmp_path: Path) -> None:
    """docs/performance.md has them: 15.0 GB a step, 128 KiB a position, 5.24 MB a rank on all linears."""
    outline = outline_of("llama-3.1-8b", tmp_path)
    assert outline.weight_bytes / 2 == 8_030_261_248
    assert round(outline.step_bytes / 1e9, 1) == 15.0
    made = divide_memory(outline, DEVICES["h100"], Wanted(adapters=8, rank=16), None)
    assert made.block == 16 * 128 << 10
    assert made.adapter / 16 == pytest.approx(5.24e6, rel=0.03)
    assert made.sites == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # Recorded are steps of up to 640 rows with prompt chunks there, none on a GPU that is no faster than the host.
    (l40s, h100) = (replace(DEVICES[name], memory=DEVICES["h100"].memory) for name in ("l40s", "h100"))
    slow, fast = (divide_memory(outline, device, Wanted(8, 16), None).activations for device in (l40s, h100))
    assert fast - slow == 640 * (6 * 4096 + 3 * 14336) * 2


def test_fewer_modules_take_fewer_pages(tmp_path: Path) -> None:
    outline = outline_of("llama-3.1-8b", tmp_path)
    layout = ArenaLayout(
        outline.site_groups, outline.num_layers, outline.dtype, max_rank=64, head=outline.head_group
    )
    few, all_sites = ("q_proj", "v_proj"), layout.site_names[:7]
    assert adapter_pages(layout, 16, few) < adapter_pages(layout, 16, all_sites)
    assert adapter_pages(layout, 9, few) == adapter_pages(layout, 16, few) > adapter_pages(layout, 8, few)
    head = divide_memory(outline, DEVICES["h100"], Wanted(4, 8, ("lm_head",)), None)
    assert head.resident >= 4


def test_a_model_through_transformers(tmp_path: Path) -> None:
    config = {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 16384,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(
        "--model", str(tmp_path), "--gpu", "l4", "--adapters", "4", "--target-modules", "q_proj,v_proj"
    )
    assert found["model_type"] == "starcoder2"
    assert found["weights"] == pytest.approx(2 * 3.03e9, rel=0.01)
    assert found["resident"] >= 4


@pytest.mark.parametrize(
    ("machine", "most"),
    [
        (("llama-3.1-8b", "l4", "--adapters", "500"), 65),
        (("smollm2-135m", "h100", "--adapters", "1025"), 1024),
        (("smollm2-135m", "cpu", "--gpu-memory", "40GiB", "--adapters", "2000"), 1024),
    ],
)
def test_adapters_beyond_the_device_wait_in_host_memory(machine: tuple[str, ...], most: int) -> None:
    model, gpu, *others = machine
    arguments = ("--model", model, "--gpu", gpu, *others)
    found = plan(*arguments)
    asked = found["wanted"]["adapters"]
    on_device = asked - found["waiting"]
    assert 0 < on_device <= min(most, found["resident"])
    assert found["places"][-1][1] >= 1
    # Those that were used last keep their copy in host memory, so there is room for a copy of each.
    assert found["in_host"] >= asked
    assert mib(found["settings"]["adapter_cpu_memory"]) >= asked * found["adapter"]
    if gpu == "cpu":
        assert found["host"] <= found["free"]
    told = run_here("plan", *arguments).stdout
    assert re.search(rf"^ +{on_device} on the device: [0-9.]+ GiB$", told, re.MULTILINE)
    assert re.search(rf"^ +{found['waiting']} wait in host memory: [0-9.]+ [GM]iB$", told, re.MULTILINE)


class TestWhatDoesNotFit:
    def fails(self, *arguments: str) -> str:
        done = run_here("plan", *arguments)
        assert (done.code, done.stdout) == (1, "")
        (line,) = [line for line in done.said if line.startswith("loraplex: ")]
        return line

    def test_weights(self) -> None:
        said = self.fails("--model", "llama-3.1-70b", "--gpu", "h100")
        assert "the weights take 131.42 GiB" in said
        assert re.search(r"a device of at least 13\d\.\d+ GiB is needed", said)

    def test_adapters_and_how_many_would(self) -> None:
        machine = ("--model", "smollm2-135m", "--gpu", "cpu", "--gpu-memory", "4GiB")
        said = self.fails(*machine, "--adapters", "500")
        (number,) = re.findall(r": (\d+) adapters of rank 16 fit", said)
        assert plan(*machine, "--adapters", number)["resident"] >= int(number)
        more = str(int(number) + 2)
        assert "adapters of rank 16 fit" in self.fails(*machine, "--adapters", more)

    def test_context(self) -> None:
        said = self.fails("--model", "llama-3.1-8b", "--gpu", "l4", "--context", "131072", "--adapters", "1")
        assert "one sequence of 131072 tokens needs 16.00 GiB" in said

    def test_longer_than_the_model(self) -> None:
        said = self.fails("--model", "mistral-7b", "--gpu", "h100", "--max-model-len", "40000")
        assert "beyond the 32768 positions" in said

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (("--model", "no-such", "--gpu", "l4"), "llama-3.1-8b"),
            (("--model", "mistral-7b", "--gpu", "tpu"), "--gpu-memory"),
            (
                ("--model", "mistral-7b", "--gpu", "x", "--gpu-memory", "many"),
                "'many': must be bytes, such as",
            ),
            (("--model", "mistral-7b", "--gpu", "x", "--gpu-memory", "4 parsecs"), "no unit"),
            (("--model", "mistral-7b", "--gpu", "l40s", "--dtype", "int4"), "--dtype"),
            (("--model", "mistral-7b", "--gpu", "l40s", "--target-modules", "qkv_proj"), "has q_proj"),
        ],
    )
    def test_what_is_not_known(self, arguments: tuple[str, ...], expected: str) -> None:
        assert expected in self.fails(*arguments)


def test_speed_is_the_formula_of_the_document(tmp_path: Path) -> None:
    """The table of docs/performance.md, for its 4.3 TB/s: 64 rows with 8 adapters are 2.8 % above 5.49 ms."""
    arguments = ("--model", "llama-3.1-8b", "--gpu", "h200", "--bandwidth", "4300", "--rank", "16")
    base, speeds = 5.49e-3, plan(*arguments, "--adapters", "8")["speed"]
    (row,) = [speed for speed in speeds if speed["rows"] == 64]
    assert row["step_s"] == pytest.approx(base * 1.028, rel=0.01)
    assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
    unknown = run_here("plan", "--model", "llama-3.1-8b", "--gpu", "other", "--gpu-memory", "48GiB")
    assert "speed: not estimated" in unknown.stdout


def test_for_people() -> None:
    told = run_here("plan", "--model", "llama-3.1-8b", "--gpu", "L40S").stdout
    assert "LORAPLEX_MODEL=hf:meta-llama/Llama-3.1-8B-Instruct" in told
    assert "One H100 took 1.2 times the estimate for the base, 1.5 to 1.9 times with adapters." in told
    assert re.search(r"weights +14\.96 GiB", told)
    assert "gpu:\n  enabled: true\nsettings:\n  model: hf:meta-llama" in told


MACHINES = {
    "a laptop": ("smollm2-135m", "cpu", "--gpu-memory", "4GiB", "--adapters", "40"),
    "a small GPU": ("llama-3.1-8b", "l4", "--adapters", "24"),
    "an older GPU": ("mistral-7b", "a100-40", "--adapters", "100", "--rank", "8"),
    "a large GPU": ("llama-3.1-8b", "h200", "--adapters", "500"),
    "one that no table has": ("llama-3.1-70b", "b300", "--gpu-memory", "288GB", "--adapters", "8"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_five_made_machines(machine: str) -> None:
    """Nothing is planned twice or left over, and a server would take the settings as they stand."""
    model, gpu, *others = MACHINES[machine]
    found = plan("--model", model, "--gpu", gpu, *others)
    parts = ("weights", "arena", "kv", "activations", "reserve", "free")
    assert sum(found[part] for part in parts) == found["total"] == found["device"]["memory"]
    assert min(found[part] for part in parts) >= 0
    assert found["resident"] == found["wanted"]["adapters"]
    pages, blocks = found["arena_pages"] * found["page"], found["kv_blocks"] * found["block"]
    assert found["resident"] * found["adapter"] <= pages
    # There is one page and one block more, which nothing owns.
    assert pages <= found["arena"] <= 1.01 * pages
    assert blocks <= found["kv"] <= 1.01 * blocks
    for context, sequences in found["places"]:
        assert sequences * context <= found["kv_blocks"] * BLOCK_SIZE
    assert [sequences for _, sequences in found["places"]] == sorted(
        (sequences for _, sequences in found["places"]), reverse=True
    )
    taken = Settings(**found["settings"])
    assert (taken.kv_cache_memory, taken.adapter_memory) == pytest.approx((blocks, pages), abs=1 << 20)


def test_a_plan_for_a_gpu_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert outline_of("llama-3.2-1b", tmp_path).dtype is torch.bfloat16


def test_engines_on_one_cpu_share_it_with_ray() -> None:
    arguments = ("--model", "smollm2-135m", "--gpu", "cpu", "--gpu-memory", "17GiB")
    each, four = plan(*arguments[:-1], "4GiB"), plan(*arguments, "--replicas", "4")
    assert four["ray_bytes"] == (600 + 4 * 100) << 20
    assert four["device"]["memory"] == ((17 << 30) - four["ray_bytes"]) // 4
    assert four["kv"] == pytest.approx(each["kv"], rel=0.05)
    assert four["settings"]["replicas"] == Settings(**four["settings"]).replicas == 4
    told = run_here("plan", *arguments, "--replicas", "4").stdout
    assert re.search(r"Ray, in host memory +1000\.0 MiB", told)


def test_engines_on_gpus_have_one_each() -> None:
    arguments = ("--model", "llama-3.1-8b", "--gpu", "l40s")
    one, two = plan(*arguments), plan(*arguments, "--replicas", "2")
    assert {**two, "replicas": 1, "ray_bytes": 0} == one
    assert two["ray_bytes"] == (600 + 2 * 100) << 20
