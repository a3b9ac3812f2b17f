"""The form of the base that an adapter's config names, beside the form that is served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.trained_base import FULL_PRECISION, INT8_ROWS, NF4, compare_bases
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, admit, refusal
from support.adapters.drafts import draft_adapter, write_base

MODEL = "Llama-3.2-1B-Instruct"
HASH = "c291d6fce4804a1d39305f388dd32897d1f7acc4"
NOT_MEASURED = "the change of its answers has not been measured yet"
NO_FIGURES = {"kl": None, "top1": None, "tokens": None}
AT_LOAD = "int8 codes made at the load"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def served(base: BaseSpec, **changes: Any) -> BaseSpec:
    return dataclasses.replace(base, **({"model_dir": f"/srv/models/{MODEL}"} | changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (None, {}),
        ("", {}),
        (MODEL, {}),
        (f"unsloth/{MODEL}", {}),
        (f"mlx-community/{MODEL}-bf16", {}),
        (f"someone/{MODEL}-hf", {}),
        (f"unsloth/{MODEL}-bnb-4bit", {"stored": "bitsandbytes nf4"}),
        (f"someone/{MODEL}-bnb-8bit", {"stored": "bitsandbytes int8"}),
        (f"someone/{MODEL}-GPTQ", {"stored": "gptq int4"}),
        (f"someone/{MODEL}-GPTQ-Int8", {"stored": "gptq int8"}),
        (f"someone/{MODEL}-GPTQ-4bit-128g", {"stored": "gptq int4"}),
        (f"someone/{MODEL}-AWQ-INT4", {"stored": "awq int4"}),
        (f"someone/{MODEL}-FP8", {"stored": "fp8"}),
        (f"RedHat/{MODEL}-quantized.w4a16",
         {"stored": "compressed-tensors int4", "model_dir": f"/srv/{MODEL}-quantized.w4a16"}),
        (f"/opt/models/{MODEL}", {"stored": "gptq int4"}),  # the directory that is served
    ],
)  # fmt: skip
def test_the_served_form_is_no_error(name: str | None, changes: dict[str, Any], base: BaseSpec) -> None:
    assert compare_bases(name, served(base, **changes)) is None


@pytest.mark.parametrize(
    ("name", "changes", "trained", "over"),
    [
        (f"unsloth/{MODEL}-bnb-4bit", {}, NF4, FULL_PRECISION),
        (f"someone/{MODEL}_4_bit", {}, NF4, FULL_PRECISION),
        (f"someone/{MODEL}-nf4", {"quantise": "int8"}, NF4, AT_LOAD),
        (f"/cache/models--unsloth--{MODEL}-bnb-4bit/snapshots/{HASH}/", {}, NF4, FULL_PRECISION),
        (f"someone/{MODEL}-8bit", {}, INT8_ROWS, FULL_PRECISION),
        (f"someone/{MODEL}-bnb-8bit", {}, INT8_ROWS, FULL_PRECISION),
        (f"meta-llama/{MODEL}", {"quantise": "int8"}, FULL_PRECISION, AT_LOAD),
        (f"someone/{MODEL}-FP8", {"stored": "fp8", "quantise": "int8"}, "fp8", AT_LOAD),
    ],
)
def test_another_form_of_the_served_checkpoint_is_named(
    name: str, changes: dict[str, Any], trained: str, over: str, base: BaseSpec
) -> None:
    found = compare_bases(name, served(base, **changes))
    assert found is not None
    assert found.as_dict() == {"trained_on": trained, "served": over, "reason": NOT_MEASURED} | NO_FIGURES
    assert (
        found.warning
        == f"the adapter was trained on {trained} of this base and is served over {over}: {NOT_MEASURED}"
    )


@pytest.mark.parametrize(
    ("name", "changes", "trained", "reason"),
    [
        (f"meta-llama/{MODEL}", {"stored": "gptq int4", "model_dir": f"/srv/{MODEL}-GPTQ"}, FULL_PRECISION,
         "quantised itself"),
        (f"unsloth/{MODEL}-bnb-4bit", {"stored": "awq int4"}, NF4, "quantised itself"),
        (f"someone/{MODEL}-GPTQ-Int4", {"stored": "gptq int8"}, "gptq-int4", "quantised itself"),
        (f"someone/{MODEL}-GPTQ-Int4", {}, "gptq-int4", "cannot be computed"),
        (f"someone/{MODEL}-AWQ", {}, "awq", "cannot be computed"),
        (f"someone/{MODEL}-Int8", {}, "int8", "cannot be computed"),  # no word of the tool
        (f"mlx-community/{MODEL}-4bit", {}, "MLX 4bit", "cannot be computed"),
        (f"/cache/models--mlx-community--{MODEL}-8bit/snapshots/{HASH}", {}, "MLX 8bit", "cannot be computed"),
        # Which linears it leaves in 16 bits is not in the name.
        (f"unsloth/{MODEL}-unsloth-bnb-4bit", {}, "unsloth-bnb-4bit", "cannot be computed"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_computed_has_its_reason(
    name: str, changes: dict[str, Any], trained: str, reason: str, base: BaseSpec
) -> None:
    found = compare_bases(name, served(base, **changes))
    assert found is not None
    assert found.trained_on == trained
    assert found.is_this_base
    assert reason in found.reason


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-0.5B-Instruct",
        "/",
        "\x00\x1b[31m\n",
        "\ud800",
        "x" * 100_000,
        f"{MODEL}-{'4-' * 100_000}",
        f"{MODEL}-{'bnb-' * 100_000}4bit",
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_another_model_and_hostile_names_are_short_ascii(name: str, base: BaseSpec) -> None:
    found = compare_bases(name, served(base))
    assert found is not None
    assert not found.is_this_base
    assert found.reason == "the config names another model, whose weights are not here"
    assert found.trained_on.isascii()
    assert found.trained_on.isprintable()
    assert len(found.trained_on) < 500
    json.dumps(found.as_dict()).encode()


def test_words_of_a_form_are_short_ascii(base: BaseSpec) -> None:
    found = compare_bases(f"\x00\n/{MODEL}-{'bnb-' * 40}4bit", served(base))
    assert found is not None
    assert found.is_this_base
    assert found.trained_on == NF4


@pytest.mark.parametrize("quantise", ["none", "int8"])
def test_a_version_s_report_has_it_with_a_warning(quantise: str, tmp_path: Path) -> None:
    base = load_base_spec(write_base(tmp_path / "base", ARCH), quantise=quantise)
    files = draft_adapter(ARCH, base_model_name_or_path="org/base-bnb-4bit").write(tmp_path)
    report = json.loads(json.dumps(admit(files, base).report))
    over = FULL_PRECISION if quantise == "none" else AT_LOAD
    assert report["base_error"] == {"trained_on": NF4, "served": over, "reason": NOT_MEASURED} | NO_FIGURES
    (check,) = [check for check in report["checks"] if check["name"] == "base_form"]
    assert not check["ok"]
    assert check["detail"].startswith(
        f"warning: the adapter was trained on {NF4} of this base and is served over {over}"
    )


@pytest.mark.parametrize(("name", "error"), [("org/base", False), (None, False), ("org/other", True)])
def test_the_same_base_and_another_model_have_no_second_warning(
    name: str | None, error: bool, tmp_path: Path
) -> None:
    base = load_base_spec(write_base(tmp_path / "base", ARCH))
    report = admit(draft_adapter(ARCH, base_model_name_or_path=name).write(tmp_path), base).report
    assert (report["base_error"] is not None) is error
    assert not [check for check in report["checks"] if check["name"] == "base_form"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, base_model_name_or_path=["a"])
    assert "base_model_name_or_path must be a string" in refusal(draft, tmp_path, base).message
