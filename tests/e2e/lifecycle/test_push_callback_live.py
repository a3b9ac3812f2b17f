"""A training with PEFT that pushes its checkpoints to a running server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from loraplex.contrib.transformers import PushCallback
from support.servers.live_server import Shop, checked

pytestmark = pytest.mark.slow


def train(model_dir: Path, out: Path, callback: PushCallback) -> None:
    """Six steps on random tokens, with a checkpoint after every second one. Each deletes the one before."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokens = torch.randint(0, 256, (12, 16))
    trainer = Trainer(
        model=get_peft_model(base, config),
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=6,
            save_steps=2,
            save_total_limit=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    trainer.train()


def test_checkpoints_of_a_training_are_served(tiny: Shop, tiny_model: Path, tmp_path: Path) -> None:
    tiny.server.create_tenant("trainer")
    key = tiny.server.create_key("trainer", scopes=["inference", "adapters:read", "adapters:write"])
    callback = PushCallback("run", tenant="trainer", url=tiny.server.data_url, api_key=key, strict=True)
    train(tiny_model, tmp_path / "out", callback)
    assert callback.pushed
    last = callback.pushed[-1]
    assert last.step == 6
    assert [pushed.version for pushed in callback.pushed] == [
        f"v{i + 1}" for i in range(len(callback.pushed))
    ]
    with tiny.server.client(key) as client:
        answer = client.post("/v1/completions", json={"model": "run", "prompt": "a", "max_tokens": 1})
        checked(answer)
        assert answer.headers["x-loraplex-adapter"] == f"run@{last.version}"
        version = checked(client.get(f"/admin/v1/tenants/trainer/adapters/run/versions/{last.version}"))
    assert version["digest"] == last.digest
    # What is served is the last checkpoint: the same bytes are that version.
    again = tiny.server.upload("trainer", "run", tmp_path / "out" / "checkpoint-6")
    assert again["version"] == last.version
