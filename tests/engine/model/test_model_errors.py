"""How far the logits of each family are from transformers': the figures of docs/reliability.md."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.backend import resolve_kernels
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, reference_logits, save_tiny
from support.models.loading import load_model

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.soak]

SEEDS = 5
LENGTHS = (3, 17, 40, 65, 110)


def in_slices(model, prompts, rng, lora=None) -> list[torch.Tensor]:
    """Random chunks and single tokens, all sequences beside each other."""
    run = PagedRun(model, prompts, seed=rng.randrange(1000))
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        chosen = rng.sample(alive, rng.randint(1, len(alive)))
        counts = {i: min(rng.choice([1, 1, 2, 5, 16, 23]), len(prompts[i]) - run.done[i]) for i in chosen}
        run.step(counts, None if lora is None else lora(counts))
    return [run.result(i) for i in range(len(prompts))]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of two logits, as a share of the standard deviation of all."""
    spread = float(torch.cat(theirs).std())
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / spread


@pytest.mark.parametrize("family", FAMILIES)
def test_worst_logit_of_a_family(family, tmp_path, capsys):
    """The same formula in float64 is the truth: rounding must cost us about what it costs transformers and PEFT."""
    rng = random.Random(family)
    errors: dict[str, list[tuple[float, float]]] = {
        "float32": [],
        "float32 with adapters": [],
        "bfloat16": [],
    }
    for seed in range(SEEDS):
        base = save_tiny(tmp_path / str(seed), FAMILIES[family], seed=seed)
        prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
        truth = reference_logits(base, prompts, torch.float64)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            ours = in_slices(load_model(base, "cpu", dtype), prompts, rng)
            errors[name].append((worst(ours, truth), worst(reference_logits(base, prompts, dtype), truth)))
        errors["float32 with adapters"].append(
            with_adapters(base, tmp_path / f"adapters-{seed}", prompts, rng)
        )
    shown = []
    for name, pairs in errors.items():
        ours, theirs = (max(column) for column in zip(*pairs, strict=True))
        shown.append(f"{name} {ours:.1e} ({theirs:.1e})")
        assert sum(a for a, _ in pairs) < 3 * sum(b for _, b in pairs), (family, name, pairs)
    with capsys.disabled():
        print(f"\n{family}: {', '.join(shown)}")


def with_adapters(base, out, prompts, rng) -> tuple[float, float]:
    model = load_model(base, "cpu", "float32")
    adapters = save_adapters(base, out)
    layout = ArenaLayout(model.site_groups, model.num_layers, model.dtype, max_rank=32)
    arena = AdapterArena(
        layout, num_pages=16, num_slots=4, kernels=resolve_kernels("auto", torch.device("cpu"))
    )
    spec, used = load_base_spec(base), 0
    for slot, path in enumerate(adapters.values()):
        files = path / "adapter_config.json", path / "adapter_model.safetensors"
        image = build_image(inspect_adapter(*files, spec, max_rank=32), files[1], layout)
        arena.write(image, slot, tuple(range(used, used + image.num_pages)))
        used += image.num_pages
    names = [None, *adapters]
    choice = [rng.choice(names) for _ in prompts]

    def lora(counts):
        segments, first = [], 0
        for i, count in counts.items():
            segments.append((names.index(choice[i]) - 1, first, count))
            first += count
        return arena.lora_pass(segments, first)

    def by_peft(dtype):
        reference = PeftReference(base, adapters, dtype)
        return [reference.logits(name, prompt) for name, prompt in zip(choice, prompts, strict=True)]

    truth = by_peft(torch.float64)
    return worst(in_slices(model, prompts, rng, lora), truth), worst(by_peft(torch.float32), truth)
