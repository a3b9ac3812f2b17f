"""The invocation of an activated LoRA in an upload: what is read, and each refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, halves, refusal
from support.adapters.drafts import AdapterDraft, draft_adapter, write_base

EMBED = "base_model.model.model.embed_tokens"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def activated(ids: Any = (5, 6), **config: Any) -> AdapterDraft:
    return draft_adapter(ARCH, alora_invocation_tokens=list(ids), **config)


def test_the_invocation_is_in_the_spec_and_the_report(tmp_path: Path, base: BaseSpec) -> None:
    files = activated([5, ARCH.vocab - 1]).write(tmp_path / "activated")
    spec = inspect_adapter(files.config, files.tensors, base, max_rank=16)
    assert spec.invocation == (5, ARCH.vocab - 1)
    told = {check["name"]: check["detail"] for check in spec.report["checks"]}
    assert told["config"] == "aLoRA"
    assert told["invocation"] == "acts from 2 invocation tokens on"
    plain = draft_adapter(ARCH).write(tmp_path / "plain")
    same = inspect_adapter(plain.config, plain.tensors, base, max_rank=16)
    assert same.invocation == ()
    assert same.digest != spec.digest


def test_dora_is_refused_as_peft_refuses_it(tmp_path: Path, base: BaseSpec) -> None:
    error = refusal(activated(dora=True), tmp_path, base)
    assert (error.code, error.feature) == ("unsupported_feature", "alora_invocation_tokens")
    assert "use_dora" in error.message


def test_an_embedding_cannot_be_activated(tmp_path: Path, base: BaseSpec) -> None:
    lora = activated(target_modules=["q_proj", "v_proj", "embed_tokens"])
    lora.tensors[f"{EMBED}.lora_embedding_A"] = halves(4, ARCH.vocab)
    lora.tensors[f"{EMBED}.lora_embedding_B"] = halves(ARCH.hidden, 4)
    rows = activated(trainable_token_indices=[3])
    rows.tensors[f"{EMBED}.token_adapter.trainable_tokens_delta"] = halves(1, ARCH.hidden)
    for number, draft in enumerate((lora, rows)):
        error = refusal(draft, tmp_path / str(number), base)
        assert (error.code, error.feature) == ("unsupported_feature", "alora_invocation_tokens")
        assert "embed_tokens" in error.message


def test_an_id_beyond_the_vocabulary_is_another_base(tmp_path: Path, base: BaseSpec) -> None:
    error = refusal(activated([1, ARCH.vocab]), tmp_path, base)
    assert error.code == "base_mismatch"
    assert f"token {ARCH.vocab}" in error.message
