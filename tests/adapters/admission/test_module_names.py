"""One module under each of its names: the same adapter, to both readers of an upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.tensors import read_tensor
from support.adapters.admission import ARCH, admit, refusal
from support.adapters.drafts import (
    AdapterDraft,
    base_tensors,
    draft_adapter,
    peft_config,
    write_base,
    write_safetensors,
)
from support.adapters.peft_zoo import train
from support.adapters.whole_reads import read_base_weight

DECODERS = ("model.", "", "model.language_model.", "language_model.", "language_model.model.")
HEADS = ("lm_head", "language_model.lm_head", "output", "embed_out")
UP1 = "layers.1.mlp.up_proj"


@pytest.fixture(scope="module", params=["model.", "", "model.language_model.", "language_model.model."])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    """A checkpoint may have any of the names too."""
    directory = write_base(tmp_path_factory.mktemp("base"), ARCH)
    tensors = {
        name.replace("model.", request.param) if name.startswith("model.") else name: tensor
        for name, tensor in base_tensors(ARCH).items()
    }
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return load_base_spec(directory)


def draft_named(decoder: str, head: str = "lm_head", **options: Any) -> AdapterDraft:
    draft = draft_adapter(ARCH, **{"targets": ["q_proj", "up_proj", "lm_head"], "ranks": {}} | options)
    draft.tensors = {
        name.replace("base_model.model.model.", f"base_model.model.{decoder}").replace("lm_head", head): t
        for name, t in draft.tensors.items()
    }
    return draft


def read_both(draft: AdapterDraft, directory: Path, base: BaseSpec) -> dict[tuple[int, str], list[Any]]:
    """Scaling, A and B by site, as the loader takes them; the second reading has found the same."""
    files = draft.write(directory)
    spec, second = admit(files, base), Upload(files.config, files.tensors, base)
    assert spec.report["rank_by_module"].keys() == {
        base.sites[s.layer, s.site].module_path for s in spec.sites
    }
    found: dict[tuple[int, str], list[Any]] = {}
    for site in spec.sites:
        ours = [site.scaling, read_tensor(files.tensors, site.a), read_tensor(files.tensors, site.b)]
        other = second.read(site.layer, site.site)
        for one, two in zip(ours, (other.scaling, other.a, other.b), strict=True):
            np.testing.assert_array_equal(one, two)
        found[site.layer, site.site] = ours
    assert second.sites.keys() == found.keys()
    return found


def assert_equal(one: dict[tuple[int, str], list[Any]], two: dict[tuple[int, str], list[Any]]) -> None:
    assert one.keys() == two.keys()
    for key, parts in one.items():
        for a, b in zip(parts, two[key], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_decoder_under_any_name_is_the_same(
    decoder: str, dora: bool, base: BaseSpec, tmp_path: Path
) -> None:
    plain = read_both(draft_named("model.", dora=dora), tmp_path / "plain", base)
    assert len(plain) == 5
    assert_equal(read_both(draft_named(decoder, dora=dora), tmp_path / "named", base), plain)


@pytest.mark.parametrize("decoder", ["model.decoder.", "decoder.", "gpt_neox.", "model.", ""])
@pytest.mark.parametrize("own", ["model.decoder.", "gpt_neox."])
def test_decoders_that_their_family_calls_by_a_word_of_its_own(
    own: str, decoder: str, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base", ARCH)
    tensors = {
        f"{own}{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in base_tensors(ARCH).items()
    }
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    base = load_base_spec(directory)
    if decoder in (own, own.partition(".")[2], "model.", ""):
        assert len(read_both(draft_named(decoder), tmp_path / "adapter", base)) == 5
    else:
        assert refusal(draft_named(decoder), tmp_path / "adapter", base).code == "base_mismatch"


@pytest.mark.parametrize("head", HEADS)
def test_a_head_under_any_name_is_the_same(head: str, base: BaseSpec, tmp_path: Path) -> None:
    for number, target in enumerate(("lm_head", head)):
        draft = draft_named("model.", head, target_modules=["q_proj", "up_proj", target])
        draft.tensors[f"base_model.model.{head}.base_layer.weight"] = read_base_weight(base, 0, "lm_head")
        found = read_both(draft, tmp_path / str(number), base)
        assert_equal(found, read_both(draft_named("model."), tmp_path / "plain", base))


def test_all_linear_leaves_out_the_head_whatever_its_name(base: BaseSpec, tmp_path: Path) -> None:
    error = refusal(draft_named("", "output", target_modules="all-linear"), tmp_path, base)
    assert (error.code, "tensors came for output" in error.message) == ("unexpected_tensor", True)


@pytest.mark.parametrize("config_decoder", DECODERS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_config_may_name_paths_by_any_name(
    decoder: str, config_decoder: str, base: BaseSpec, tmp_path: Path
) -> None:
    """Whole paths in each field that has them, of the tensors' own version or of another."""
    q0, up0, up1 = (f"{config_decoder}layers.{p}" for p in ("0.self_attn.q_proj", "0.mlp.up_proj", UP1[7:]))
    fields = {
        "target_modules": [q0, up0, up1, "lm_head", "k_proj"],
        "exclude_modules": [f"{config_decoder}layers.{i}.self_attn.k_proj" for i in (0, 1)],
        "rank_pattern": {up1: 6},
        "alpha_pattern": {f"^{up0}$": 3, up1.replace(".", r"\."): 5},
    }
    draft = draft_named(decoder, ranks={f"model.{UP1}": 6}, **fields)
    for name in [name for name in draft.tensors if ".1.self_attn.q_proj" in name]:
        del draft.tensors[name]
    found = read_both(draft, tmp_path, base)
    assert {key: parts[0] for key, parts in found.items()} == {
        (0, "q_proj"): 2.0,
        (0, "up_proj"): 3 / 4,
        (1, "up_proj"): 5 / 6,
        (0, "lm_head"): 2.0,
    }


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_expression_for_alphas_is_matched_with_the_names_of_the_tensors(
    decoder: str, base: BaseSpec, tmp_path: Path
) -> None:
    expression = rf"{decoder}layers\.1\..*_proj".replace("model.", r"model\.")
    draft = draft_named(decoder, targets=["q_proj", "up_proj"], alpha_pattern={f"^{expression}": 2})
    found = read_both(draft, tmp_path, base)
    assert {key: parts[0] for key, parts in found.items()} == {
        (0, "q_proj"): 2.0, (0, "up_proj"): 2.0, (1, "q_proj"): 0.5, (1, "up_proj"): 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
def test_layers_are_chosen_under_any_name(decoder: str, base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_named(decoder, layers=[1], targets=["q_proj"])
    assert read_both(draft, tmp_path / "one", base).keys() == {(1, "q_proj")}
    draft.config["layers_to_transform"] = [0]
    assert refusal(draft, tmp_path / "other", base).code == "unexpected_tensor"


@pytest.mark.parametrize("decoder", DECODERS)
def test_copies_of_the_base_s_weights_are_found_under_any_name(
    decoder: str, base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_named(decoder, targets=["q_proj"])
    embeddings = base_tensors(ARCH)["model.embed_tokens.weight"]
    name = f"base_model.model.{decoder}embed_tokens.weight"
    draft.tensors |= {name: embeddings}
    assert admit(draft.write(tmp_path / "equal"), base).report["modules_ignored"] == 1
    draft.tensors |= {name: embeddings[::-1]}
    assert refusal(draft, tmp_path / "other", base).code == "base_mismatch"


@pytest.mark.parametrize(
    ("other", "ways"),
    [
        (draft_named("language_model.model.", targets=["q_proj"]), "model.layers and language_model.model.layers"),
        (draft_named("", targets=["v_proj"]), "model.layers and layers"),
        (draft_named("model.", "output", targets=["lm_head"]), "lm_head and output"),
    ],
)  # fmt: skip
def test_two_names_in_one_file_are_refused(
    other: AdapterDraft, ways: str, base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_named("model.", targets=["q_proj", "lm_head"])
    draft.tensors |= other.tensors
    draft.config["target_modules"] = ["q_proj", "v_proj", "lm_head", "output"]
    error = refusal(draft, tmp_path, base)
    assert (error.code, ways in error.message) == ("unexpected_tensor", True), error.message


@pytest.mark.parametrize(
    "decoder", ["model.vision_tower.vision_model.encoder.", "model.model.", "encoder.", "transformer."]
)
def test_what_only_resembles_a_name_is_none(decoder: str, base: BaseSpec, tmp_path: Path) -> None:
    assert refusal(draft_named(decoder, targets=["q_proj"]), tmp_path, base).code == "base_mismatch"


def test_a_target_that_other_models_call_their_head_is_not_taken_for_it(
    base: BaseSpec, tmp_path: Path
) -> None:
    """Lists are made for many models: "output" is a linear of an attention there."""
    draft = draft_named("model.", targets=["q_proj"])
    draft.config |= peft_config(target_modules=["q_proj", "output"])
    checks = admit(draft.write(tmp_path), base).report["checks"]
    (warning,) = [c["detail"] for c in checks if c["name"] == "coverage" and not c["ok"]]
    assert "output" in warning
    assert "lm_head" not in warning


WRAPPED: dict[str, tuple[str, str]] = {
    "a compiled model": ("base_model.model._orig_mod.model.layers.{}.{}", "_orig_mod.model.layers.{}.{}"),
    "compiled layers": ("base_model.model.model.layers.{}._orig_mod.{}", "model.layers.{}._orig_mod.{}"),
    "a compiled model of PEFT": ("_orig_mod.base_model.model.model.layers.{}.{}", "model.layers.{}.{}"),
    "a model of DataParallel": ("module.base_model.model.model.layers.{}.{}", "model.layers.{}.{}"),
    "a sharded model": (
        "base_model.model._fsdp_wrapped_module.model.layers.{}._fsdp_wrapped_module.{}", "model.layers.{}.{}",
    ),
    "checkpointed layers": (
        "base_model.model.model.layers.{}._checkpoint_wrapped_module.{}",
        "model.layers.{}._checkpoint_wrapped_module.{}",
    ),
    "all at once": (
        "_orig_mod.module.base_model.model._orig_mod.model.layers.{}._fsdp_wrapped_module._orig_mod.{}",
        "_orig_mod.model.layers.{}._fsdp_wrapped_module._orig_mod.{}",
    ),
}  # fmt: skip


def draft_wrapped(tensor: str, path: str) -> AdapterDraft:
    """Whole paths in each field that has them, and an expression."""
    q0, up0, up1 = (
        path.format(*where) for where in ((0, "self_attn.q_proj"), (0, "mlp.up_proj"), (1, "mlp.up_proj"))
    )
    draft = draft_adapter(
        ARCH,
        ranks={f"model.{UP1}": 6},
        targets=["q_proj", "up_proj"],
        target_modules=[q0, up0, up1, "k_proj"],
        exclude_modules=[path.format(i, "self_attn.k_proj") for i in (0, 1)],
        rank_pattern={up1: 6},
        alpha_pattern={
            f"^{up0}$": 3,
            up1.replace(".", r"\."): 5,
            f"{q0[:-6].replace('.', chr(92) + '.')}[qr]_proj": 7,
        },
    )
    draft.tensors = {
        tensor.format(*name.removeprefix("base_model.model.model.layers.").split(".", 1)): t
        for name, t in draft.tensors.items()
        if ".1.self_attn" not in name
    }
    return draft


@pytest.mark.parametrize("case", WRAPPED)
def test_an_adapter_of_a_wrapped_model_is_that_of_the_model_itself(
    case: str, base: BaseSpec, tmp_path: Path
) -> None:
    plain = draft_wrapped("base_model.model.model.layers.{}.{}", "model.layers.{}.{}")
    expected = read_both(plain, tmp_path / "plain", base)
    assert {key: parts[0] for key, parts in expected.items()} == {
        (0, "q_proj"): 7 / 4, (0, "up_proj"): 3 / 4, (1, "up_proj"): 5 / 6,
    }  # fmt: skip
    assert_equal(read_both(draft_wrapped(*WRAPPED[case]), tmp_path / "wrapped", base), expected)


def test_two_tensors_of_one_module_are_refused_whatever_wraps_it(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_named("model.", targets=["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    draft.tensors[name.replace("model.model.", "model._orig_mod.model.")] = draft.tensors[name]
    error = refusal(draft, tmp_path, base)
    assert (error.code, "another tensor stands for the same weight" in error.message) == (
        "unexpected_tensor",
        True,
    )


def test_what_peft_saves_of_wrapped_models_is_served_or_told_to_be_empty(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers import AutoModelForCausalLM

    directory = write_base(tmp_path / "base", ARCH, dtype="F32")
    spec = load_base_spec(directory)

    def adapted(model: Any, **options: Any) -> Any:
        return get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **options)
        )

    def saved(model: Any, name: str, **options: Any) -> tuple[Path, Path]:
        train(model, 0, 0.1)
        model.save_pretrained(str(tmp_path / name), **options)
        return tmp_path / name / "adapter_config.json", tmp_path / name / "adapter_model.safetensors"

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    files = saved(adapted(torch.compile(load()), trainable_token_indices=[1, 2]), "compiled")
    found = inspect_adapter(*files, spec, max_rank=16)
    # Of a compiled model PEFT's all-linear does not know the head, and takes it too.
    assert (len(found.sites), [t.ids for t in found.tokens]) == (15, [(1, 2)])
    assert len(Upload(*files, spec).sites) == 16
    wrapped = adapted(load())
    apply_activation_checkpointing(wrapped, check_fn=lambda module: "DecoderLayer" in type(module).__name__)
    model = adapted(load())
    for empty in (
        saved(wrapped, "checkpointed"),
        saved(model, "parallel", state_dict={f"module.{k}": v for k, v in model.state_dict().items()}),
    ):
        with pytest.raises(AdapterRefused, match="without state_dict and outside of wrappers"):
            inspect_adapter(*empty, spec, max_rank=16)
