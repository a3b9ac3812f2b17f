"""`loraplex plan` for adapters on routed experts: as large as the images that a server makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.spec import BaseSpec
from loraplex.app.plan.expert_forms import EXPERT_FORMS
from loraplex.engine.sizing import adapter_layout
from support import markdown
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.expert_adapters import Arrays, pairs, stacks, three_dimensions, write
from support.models.loading import outline_model
from support.servers.run_here import run_here

ATTENTION = ("q_proj", "o_proj")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
TINY = ("--gpu", "cpu", "--gpu-memory", "3GiB", "--dtype", "float32", "--adapters", "4", "--context", "64")
LARGE = ("--gpu", "cpu", "--gpu-memory", "128GiB", "--dtype", "bfloat16", "--adapters", "4", "--rank", "8")


def plan(*arguments: str) -> dict[str, Any]:
    done = run_here("plan", *arguments, "--json")
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that an adapter of rank 1 takes several pages."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 64}
    return save_tiny(tmp_path_factory.mktemp("bases") / "qwen3_moe", FAMILIES["qwen3_moe"] | sizes)


def save(form: str, base: BaseSpec, rank: int, folder: Path) -> Path:
    """An adapter on attention and experts, as the trainer of this form saves it."""
    random = np.random.default_rng(3)
    tensors: Arrays = {}
    for (layer, site), shape in base.sites.items():
        if site in ATTENTION:
            path = f"model.layers.{layer}.self_attn.{site}"
            tensors[f"{path}.lora_A.weight"] = random.standard_normal((rank, shape.in_features), np.float32)
            tensors[f"{path}.lora_B.weight"] = random.standard_normal((shape.out_features, rank), np.float32)
    if form in ("pairs", "shared"):
        made = pairs if form == "pairs" else three_dimensions
        any_module = r".*\.(q_proj|o_proj|experts\..*)"
        return write(folder, tensors | made(base.experts, rank), r=rank, target_modules=any_module)
    whole, half = (stacks(base.experts, ranks) for ranks in (2 * rank if form == "doubled" else rank, rank))
    tensors |= {name: (whole if ".base_layer." in name else half)[name] for name in half}
    patterns = {r".*\.gate_up_proj": 2 * rank} if form == "doubled" else {}
    on_parameters: dict[str, Any] = {"target_modules": [*ATTENTION], "target_parameters": BOTH}
    return write(folder, tensors, r=rank, rank_pattern=patterns, **on_parameters)


@pytest.mark.parametrize("rank", [1, 8, 12])
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_a_planned_adapter_is_as_large_as_its_image(form: str, rank: int, base: Path, tmp_path: Path) -> None:
    spec_of_base = load_base_spec(base)
    folder = save(form, spec_of_base, rank, tmp_path / "adapter")
    tensors = folder / "adapter_model.safetensors"
    spec = inspect_adapter(folder / "adapter_config.json", tensors, spec_of_base, max_rank=64)
    layout = adapter_layout(outline_model(base, torch.device("cpu"), "float32"), 64)
    image = build_image(spec, tensors, layout)
    assert image.num_pages > 1
    found = plan(
        "--model", str(base), *TINY, "--rank", str(rank), "--target-modules", ",".join(ATTENTION), "--experts", form
    )  # fmt: skip
    assert found["adapter"] == pytest.approx(image.num_bytes, rel=0.05)
    assert found["resident"] >= 4
    (listed,) = [each for each in found["experts"]["forms"] if each["name"] == form]
    assert (listed["adapter"], listed["resident"]) == (found["adapter"], found["resident"])
    image.release()


def test_known_sizes_of_a_mixture_of_30b() -> None:
    """Values of A and B of each of 128 experts in 48 layers, in 16 bits. Hidden size 2048, an expert's 768."""
    gate, gate_up, down = 2048 + 768, 2048 + 2 * 768, 768 + 2048
    of_expert = {
        "pairs": 2 * gate + down,
        "stacked": gate_up + down,
        "doubled": 2 * gate_up + down,
        "shared": 3 * (768 + 2048 / 128),
    }
    without = plan("--model", "qwen3-30b-a3b", *LARGE)
    assert (without["adapter_on_experts"], without["experts"]["obstacle"]) == (0, "")
    assert without["experts"]["weights"] == 48 * 128 * 3 * 2048 * 768 * 2
    sizes = {each["name"]: each["adapter"] - without["adapter"] for each in without["experts"]["forms"]}
    assert sizes == pytest.approx({form: 48 * 128 * n * 8 * 2 for form, n in of_expert.items()}, rel=0.05)
    found = plan("--model", "qwen3-30b-a3b", *LARGE, "--experts", "doubled")
    assert found["adapter_on_experts"] == found["adapter"] - without["adapter"] == sizes["doubled"]


def test_the_table_of_the_page() -> None:
    """docs/peft-support.md, in MiB."""
    page = markdown.read("docs/peft-support.md").partition("### What it takes\n")[2].partition("\n## ")[0]
    header, _, *rows = [re.findall(r"[^|` ]+", line) for line in page.splitlines() if line.startswith("|")]
    assert (header, len(rows)) == (["MiB", *EXPERT_FORMS], 3)
    for name, *shown in rows:
        found = plan("--model", name, *LARGE)
        sizes = [each["adapter"] - found["adapter"] for each in found["experts"]["forms"]]
        assert shown == [str(size >> 20) for size in sizes], name


def test_a_row_reads_the_adapter_on_the_experts_that_it_goes_through() -> None:
    asked = ("--model", "qwen3-30b-a3b", *LARGE, "--bandwidth", "100", "--max-num-seqs", "2")
    without, found = plan(*asked), plan(*asked, "--experts", "pairs")
    (one, two), (bare_one, bare_two) = found["speed"], without["speed"]
    read = found["adapter_on_experts"] * 8 / 128 / 100e9
    assert one["step_s"] - bare_one["step_s"] == pytest.approx(read)
    assert two["step_s"] - bare_two["step_s"] == pytest.approx(2 * read)


def test_for_people() -> None:
    told = run_here("plan", "--model", "olmoe-1b-7b", *LARGE, "--experts", "shared").stdout
    assert re.search(
        r"^adapters: .* at rank 8 on q_proj, .*, and on routed experts \(shared\)$", told, re.MULTILINE
    )
    assert re.search(r"^64 routed experts in 16 layers: 12\.00 GiB of the weights$", told, re.MULTILINE)
    for form, what in EXPERT_FORMS.items():
        assert re.search(rf"^  {form} +[0-9.]+ MiB +\d+  {re.escape(what)}$", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("qwen3-8b", "--gpu", "cpu", "--gpu-memory", "64GiB"), "a qwen3 has no routed experts"),
    ],
)
def test_where_adapters_cannot_be_on_experts(arguments: tuple[str, ...], expected: str) -> None:
    done = run_here("plan", "--model", *arguments, "--experts", "pairs")
    assert (done.code, done.stdout) == (1, "")
    assert f"--experts pairs: {expected}" in done.stderr
    others = plan("--model", *arguments)["experts"]
    assert others is None or (others["forms"], others["obstacle"]) == ([], expected)


def test_a_form_that_is_not_known() -> None:
    done = run_here("plan", "--model", "qwen3-30b-a3b", "--gpu", "h200", "--experts", "both")
    assert "--experts both: give none, pairs, stacked, doubled or shared." in done.stderr
