"""The GPU bench of an engine over weights and KV in fewer bits: the same weights in every form, and wrong ones told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.gpu.engine import checkpoint, forms
from bench.gpu.engine.scenes import Load

CPU = torch.device("cpu")
SHAPE = replace(forms.SMALL, lengths=(9,), output=1, loads=(Load(1, 2, 2, 1),))
INT4 = forms.FORMS[1]


def write(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    folders = {form: folder / form for form in (forms.REFERENCE, "int4", "fp8")}
    checkpoint.write_forms(folders, SHAPE.options, torch.bfloat16, CPU, SHAPE.group)
    return {form: load_file(path / "model-00000.safetensors") for form, path in folders.items()}


@pytest.mark.slow
def test_all_checkpoints_stand_for_the_same_weights(tmp_path: Path) -> None:
    found = write(tmp_path)
    plain, codes, floats = found[forms.REFERENCE], found["int4"], found["fp8"]
    linears = [name for name in plain if name.endswith("_proj.weight")]
    assert len(linears) == 7
    for name in linears:
        words, scales = codes[f"{name}_packed"], codes[f"{name}_scale"].float()
        numbers = torch.stack([words >> 4 * place & 15 for place in range(8)], -1).flatten(1) - 8
        assert 4 <= numbers.abs().max() <= 7
        assert codes[f"{name}_shape"].tolist() == list(plain[name].shape)
        assert torch.equal(numbers * scales.repeat_interleave(SHAPE.group, 1), plain[name].float())
        assert floats[name].dtype is torch.float8_e4m3fn
        assert torch.equal(floats[name].float() * floats[f"{name}_scale"], plain[name].float())
    for name in set(plain) - set(linears):
        assert torch.equal(plain[name], codes[name])
        assert torch.equal(plain[name], floats[name])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_forms_are_near_and_a_wrong_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = checkpoint._words
    monkeypatch.setattr(checkpoint, "_words", lambda codes: right(codes.roll(1, 0)))
    wrong = replace(INT4, name="wrong")
    fp8 = replace(forms.FORMS[2], error=0.001)
    failing = replace(INT4, name="fails", settings={"kernels": "none"})
    rows = list(forms.run_forms(SHAPE, CPU, tmp_path, [forms.FORMS[0], wrong, fp8, failing, forms.FORMS[3]]))
    by_form = {name: [row for row in rows if row["form"] == name] for name in {row["form"] for row in rows}}
    assert {name: all(row["ok"] for row in found) for name, found in by_form.items()} == {
        "all": True, forms.REFERENCE: True, "wrong": False, "fp8": True, "fails": False, "int8 KV": True,
    }  # fmt: skip
    engine, answers, load = by_form["wrong"]
    assert (engine["stored"], engine["ok"], load["ok"]) == ("compressed-tensors int4", True, True)
    assert answers["error"] > 0.5
    assert by_form["fp8"][0]["stored"] == "fp8"
    assert by_form["int8 KV"][0]["kv_dtype"] == "int8"
    assert by_form["int8 KV"][1]["error"] > 0
    assert [row["case"] for row in by_form["fails"]] == ["failed"]
    assert load["tokens_per_s"] > 0 < load["step_of_16_bits"]
