"""Our decoders compute what transformers computes, however a batch is cut."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoConfig

from loraplex.engine.model import model_plan
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.model.loading import load_wrapped
from loraplex.engine.model.model_plan import TESTED
from loraplex.engine.model.probe import probe
from loraplex.engine.model.wrapped import TransformersDecoder
from loraplex.kernels.linear import dense
from loraplex.kernels.numba_runtime.vectors import host_features
from support.models.checkpoints import (
    FAMILIES,
    OTHERS,
    VOCAB,
    PagedRun,
    edit_config,
    reference_logits,
    save_tiny,
)
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LENGTHS = (1, 3, 16, 17, 40, 65)


BY_NUMBA = ("llama-biases", "mistral-window", "phi3-partial", "gemma2", "gemma3")
"""A family of each kind that its kernels know; the long version has all."""


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES,
        *OTHERS,
        *(
            pytest.param(f"{name} numba", marks=() if name in BY_NUMBA else pytest.mark.soak)
            for name in FAMILIES
        ),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model, prompts, and transformers' logits for them."""
    name, _, kernels = request.param.partition(" ")
    path = save_tiny(tmp_path_factory.mktemp(name), {**FAMILIES, **OTHERS}[name])
    rng = random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    model = load_model(path, "cpu", "float32", kernels=kernels or "torch")
    assert isinstance(model, FusedDecoder if name in FAMILIES else TransformersDecoder)
    return model, prompts, reference_logits(path, prompts)


def check(run: PagedRun, expected: list[torch.Tensor], which: list[int] | None = None) -> None:
    for i in range(len(expected)) if which is None else which:
        atol = 1e-4
        if any(kind.state_bytes for kind in run.model.shape.caches):
            # The differences of logarithms in transformers' chunks of a delta net lose digits.
            atol *= float(expected[i].abs().max())
        torch.testing.assert_close(run.result(i), expected[i], atol=atol, rtol=1e-4)


def test_whole_prompts_in_one_batch(served):
    model, prompts, expected = served
    run = PagedRun(model, prompts)
    run.step({i: len(p) for i, p in enumerate(prompts)})
    check(run, expected)


def test_decode_token_by_token(served):
    model, prompts, expected = served
    run = PagedRun(model, prompts, gather_blocks=6)  # so small that the decode rows are split
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        run.step(dict.fromkeys(reversed(alive), 1))
    check(run, expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_mixed_slices(served, seed):
    model, prompts, expected = served
    rng = random.Random(seed)
    run = PagedRun(model, prompts, seed=seed)
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        chosen = rng.sample(alive, rng.randint(1, len(alive)))
        run.step({i: min(rng.choice([1, 1, 2, 5, 16, 23]), len(prompts[i]) - run.done[i]) for i in chosen})
    check(run, expected)


def test_a_sequence_that_breaks_does_not_reach_its_neighbours(served):
    """Its rows turn to NaN; so does what it leaves in the cache, which the next owner of its blocks must not see."""
    model, prompts, expected = served
    run = PagedRun(model, prompts)

    class Poison:
        def apply(self, layer, group, x, y):
            y[-len(prompts[-1]) :] = float("nan")

    run.step({i: len(p) for i, p in enumerate(prompts)}, Poison())
    check(run, expected, list(range(len(prompts) - 1)))
    assert run.result(len(prompts) - 1).isnan().all()
    again = PagedRun(model, prompts)
    again.kv = run.kv
    again.tables[3] = run.tables[-1]
    again.step({3: len(prompts[3]) - 1})
    again.step({3: 1})
    check(again, expected, [3])


def test_every_adapter_site_is_reached_with_its_input(served):
    """Adding a linear map of a group's input to its output equals changing the weights themselves."""
    model, prompts, _ = served

    class Recorder:
        def __init__(self):
            self.calls = []

        def apply(self, layer, group, x, y):
            assert x.shape == (len(prompts[3]), groups[group].in_features)
            assert y.shape == (len(prompts[3]), sum(groups[group].out_features))
            self.calls.append((layer, group))

    groups = {g.key: g for g in model.site_groups}
    recorder = Recorder()
    PagedRun(model, prompts).step({3: len(prompts[3])}, recorder)
    every = range(model.num_layers)
    assert sorted(recorder.calls) == sorted(
        (i, key) for key, group in groups.items() for i in (every if group.layers is None else group.layers)
    )


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen2", "phi3", "gemma2", "gemma3", "olmo2"])
def test_adapters_equal_changed_weights(name, tmp_path):
    """Each site in turn: base rows keep the base's logits, the others get those of a merged checkpoint."""
    from safetensors.torch import load_file, save_file

    base = save_tiny(tmp_path / "base", {**FAMILIES, **OTHERS}[name])
    model = load_model(base, "cpu", "float32")
    prompts = [[5, 9, 2, 77, 31, 8], [5, 9, 2, 77, 31, 8]]
    plain = reference_logits(base, prompts[:1])[0]
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for group in model.site_groups:
        first = 0
        for site, width in zip(group.sites, group.out_features, strict=True):
            part = "self_attn" if group.key in ("qkv", "o") or site[0] in "qkvo" else "mlp"
            delta = torch.randn(width, group.in_features, generator=generator) * 0.3
            merged = dict(weights)
            merged[f"model.layers.1.{part}.{site}.weight"] = (
                weights[f"model.layers.1.{part}.{site}.weight"] + delta
            )
            path = tmp_path / site
            path.mkdir()
            (path / "config.json").write_text((base / "config.json").read_text())
            save_file(merged, path / "model.safetensors", metadata={"format": "pt"})

            class OneSite:
                def apply(self, layer, key, x, y, group=group, first=first, width=width, delta=delta):
                    if layer == 1 and key == group.key:
                        y[6:, first : first + width] += x[6:] @ delta.T

            run = PagedRun(model, prompts)
            run.step({0: 6, 1: 6}, OneSite())
            torch.testing.assert_close(run.result(0), plain, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                run.result(1), reference_logits(path, prompts[:1])[0], atol=1e-4, rtol=1e-4
            )
            assert (run.result(1) - plain).abs().max() > 1e-3, site
            first += width


def test_only_the_rows_asked_for(tmp_path):
    path = save_tiny(tmp_path, FAMILIES["llama"])
    model = load_model(path, "cpu", "float32")
    run = PagedRun(model, [[3, 4, 5, 6]])
    run.step({0: 4})
    from dataclasses import replace

    batches = []
    original = model.forward
    model.forward = lambda batch: (batches.append(batch), original(batch))[1]  # type: ignore[method-assign]
    again = PagedRun(model, [[3, 4, 5, 6]])
    again.step({0: 4})
    for rows in ([], [3], [2, 0]):
        got = original(replace(batches[0], logits_rows=torch.tensor(rows, dtype=torch.int64)))
        torch.testing.assert_close(got, run.result(0)[rows])


def test_sharded_checkpoint_and_saved_head(tmp_path):
    whole = save_tiny(tmp_path / "whole", FAMILIES["llama"])
    shards = save_tiny(tmp_path / "shards", FAMILIES["llama"], max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    prompt = [[4, 8, 15, 16, 23, 42]]
    runs = [PagedRun(load_model(path, "cpu", "float32"), prompt) for path in (whole, shards)]
    for run in runs:
        run.step({0: 6})
    assert torch.equal(runs[0].result(0), runs[1].result(0))


def test_older_configs_are_understood(tmp_path):
    """rope_theta and rope_scaling beside each other, torch_dtype, no head_dim: as transformers 4 wrote them."""
    path = save_tiny(tmp_path, FAMILIES["llama-3.1"])
    prompt = [list(range(40))]
    expected = reference_logits(path, prompt)[0]
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(
        path, rope_parameters=None, rope_theta=theta, rope_scaling=rope, dtype=None, torch_dtype="float32",
        head_dim=None,
    )  # fmt: skip
    run = PagedRun(load_model(path, "cpu"), prompt)
    run.step({0: 40})
    torch.testing.assert_close(run.result(0), expected, atol=1e-4, rtol=1e-4)


def test_dtype_is_the_checkpoints_own_unless_asked(tmp_path, monkeypatch):
    path = save_tiny(tmp_path, FAMILIES["llama"])
    edit_config(path, dtype="bfloat16")
    monkeypatch.setattr(dense, "multiplies", lambda dtype, device: dtype is torch.float32)
    monkeypatch.setattr(model_plan, "multiplies", dense.multiplies)
    assert load_model(path, "cpu", kernels="torch").dtype is torch.float32  # torch's can't on this processor
    assert load_model(path, "cpu", "bfloat16", kernels="torch").dtype is torch.bfloat16
    if "avx2" in host_features():
        assert load_model(path, "cpu", kernels="numba").dtype is torch.bfloat16  # they widen it themselves
        assert "widen" in plan_model(path, kernels="numba").explain()
    monkeypatch.setattr(dense, "multiplies", lambda dtype, device: True)
    assert load_model(path, "cpu", kernels="torch").dtype is torch.bfloat16
    assert load_model(path, "cpu", "float32", kernels="torch").dtype is torch.float32


def test_dtype_of_a_model_through_transformers_is_what_torch_multiplies(tmp_path, monkeypatch):
    path = save_tiny(tmp_path, OTHERS["granite"])
    edit_config(path, dtype="bfloat16")
    monkeypatch.setattr(model_plan, "multiplies", lambda dtype, device: dtype is torch.float32)
    assert load_model(path, "cpu").dtype is torch.float32
    assert "float32 (this processor cannot" in plan_model(path).explain()


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "odd": 2}}, "odd"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq' is not served"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("mistral", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"attention_bias": True}, "bias"),
        ("llama", {"vocab_size": VOCAB + 1}, "embed_tokens"),
        ("llama", {"num_hidden_layers": 2}, "layers.2"),
        ("llama", {"num_hidden_layers": 4}, "layers.3"),
        ("llama", {"num_key_value_heads": 3}, "key-value heads"),
        ("llama", {"model_type": "no-such-thing"}, "no-such-thing"),
    ],
)
def test_configs_that_mean_another_computation_are_refused(base, change, words, tmp_path):
    path = save_tiny(tmp_path, FAMILIES[base])
    edit_config(path, **change)
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu")


def test_a_harmless_unknown_field_is_no_reason_to_refuse(tmp_path, caplog):
    path = save_tiny(tmp_path, FAMILIES["llama"])
    edit_config(path, made_with="some tool")
    load_model(path, "cpu")
    assert "made_with" in caplog.text


def test_a_damaged_directory_is_one_clear_error(tmp_path):
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        load_model(tmp_path, "cpu")
    path = save_tiny(tmp_path / "m", FAMILIES["llama"])
    (path / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(ModelUnsupported, match="safetensors"):
        load_model(path, "cpu")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match="safetensors"):
        load_model(path, "cpu")


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_a_missing_or_misshapen_weight_is_not_made_up(family, tmp_path):
    from safetensors.torch import load_file, save_file

    path = save_tiny(tmp_path, {**FAMILIES, **OTHERS}[family])
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for broken in (
        weights | {name: weights[name][:, :-1].contiguous()},
        {k: v for k, v in weights.items() if k != name},
    ):
        save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelUnsupported, match=r"layers\.1\.mlp\.down_proj"):
            load_model(path, "cpu")


def test_tested_list_is_what_is_tested():
    assert {options["model_type"] for options in OTHERS.values()} == TESTED


UNTESTED_GOOD = {
    "cohere": {"model_type": "cohere", "logit_scale": 0.3},
    "stablelm": {"model_type": "stablelm"},
    "phi": {"model_type": "phi"},
    "phimoe": {"model_type": "phimoe", "sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},
    "granite_swa": {"model_type": "granite_swa", "sliding_window": 9},
}


@pytest.mark.parametrize("name", UNTESTED_GOOD)
def test_an_untested_architecture_that_matches_is_served(name, tmp_path):
    path = save_tiny(tmp_path, UNTESTED_GOOD[name])
    prompts = [[(7 * i + k) % VOCAB for i in range(50)] for k in range(2)]
    run = PagedRun(load_model(path, "cpu", "float32"), prompts)
    run.step({0: 20, 1: 50})
    run.step({0: 30})
    check(run, reference_logits(path, prompts))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2},
        {"model_type": "recurrent_gemma"},
        {"model_type": "diffllama"},
        {"model_type": "doge"},
        # Its chunks of attention are longer than the probe, and only its masks tell of them.
        {
            "model_type": "llama4_text",
            "attention_chunk_size": 64,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
        },
    ],
    ids=lambda o: o["model_type"],
)
def test_an_architecture_that_does_not_match_is_refused(options, tmp_path):
    """By what it computes too, where it is listed by its name."""
    path = save_tiny(tmp_path, options)
    with pytest.raises(ModelUnsupported):
        load_model(path, "cpu", "float32")
    with pytest.raises(ModelUnsupported):
        probe(load_wrapped(path, AutoConfig.from_pretrained(path), torch.float32, torch.device("cpu")))


def test_a_device_without_the_memory_is_no_fault_of_the_config(tmp_path, monkeypatch):
    def full(module, device):
        raise torch.OutOfMemoryError("no memory left")

    path = save_tiny(tmp_path, OTHERS["olmo2"])
    config = AutoConfig.from_pretrained(path)
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_wrapped(path, config, torch.float32, torch.device("cpu"))
