"""A training with PEFT that pushes each step to a series of a running server, from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from loraplex.contrib.series import SeriesCallback, SeriesFailed
from support.servers.live_server import Shop, checked

pytestmark = pytest.mark.slow

STEPS = 6
TOKENS = [[1, 2, 3, 4, 5, 6, 7, 8], [200, 100, 50]]


def train(model_dir: Path, out: Path, callback: SeriesCallback) -> Trainer:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    tokens = torch.randint(0, 256, (12, 16))
    trainer = Trainer(
        model=get_peft_model(base, config),
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=STEPS,
            learning_rate=0.05,
            warmup_steps=1,
            save_strategy="no",
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    trainer.train()
    return trainer


def test_each_step_serves_and_agrees_with_the_trainer(tiny: Shop, tiny_model: Path, tmp_path: Path) -> None:
    tiny.server.create_tenant("stepper")
    scopes = ["inference", "adapters:read", "adapters:write", "adapters:train"]
    key = tiny.server.create_key("stepper", scopes=scopes)
    callback = SeriesCallback(
        "policy", agree_on=TOKENS, rules={"keep_last": 2}, url=tiny.server.data_url, api_key=key
    )
    trainer = train(tiny_model, tmp_path / "out", callback)
    # The first step of the warm-up has the learning rate 0, and changes nothing.
    assert [(one.step, one.version) for one in callback.pushed] == [
        (step, f"v{step - 1}") for step in range(2, STEPS + 1)
    ]
    print([f"{one.agreement['max']:.1e}" for one in callback.pushed])
    assert max(one.agreement["max"] for one in callback.pushed) < 1e-5
    assert not (tmp_path / "out" / "checkpoint-6").exists()
    told = [row for row in trainer.state.log_history if "loraplex/version" in row]
    assert told[-1]["loraplex/version"] == callback.pushed[-1].version
    assert told[-1]["loraplex/agreement_mean"] == callback.pushed[-1].agreement["mean"]
    assert trainer.model.training, "the callback leaves the model as it was"
    with tiny.server.client(key) as client:
        answer = client.post("/v1/completions", json={"model": "policy", "prompt": "a", "max_tokens": 1})
        checked(answer)
        assert answer.headers["x-loraplex-adapter"] == f"policy@{callback.pushed[-1].version}"

        def is_trimmed() -> bool:
            versions = checked(client.get("/admin/v1/tenants/stepper/adapters/policy/versions"))["data"]
            return [row["state"] for row in versions].count("ready") == 2

        tiny.server.wait(is_trimmed)


def test_a_threshold_holds_each_step_to_the_trainer(tiny: Shop, tiny_model: Path, tmp_path: Path) -> None:
    """Whether the callback sets the rules, or finds them."""
    tiny.server.create_tenant("held")
    key = tiny.server.create_key("held", scopes=["adapters:read", "adapters:write", "adapters:train"])
    for rules, agree_on in (({"agree_within": 1e-5}, TOKENS), (None, TOKENS), (None, [])):
        callback = SeriesCallback(
            "policy", agree_on=agree_on, rules=rules, url=tiny.server.data_url, api_key=key
        )
        if not agree_on:
            with pytest.raises(SeriesFailed, match="422 agreement_missing"):
                train(tiny_model, tmp_path / "out", callback)
            continue
        train(tiny_model, tmp_path / "out", callback)
        assert len(callback.pushed) == STEPS - 1
        assert max(one.agreement["mean"] for one in callback.pushed) < 1e-5
    with tiny.server.client(key) as client:
        found = checked(client.get("/admin/v1/tenants/held/adapters/policy/versions"))["data"]
        ready = [row["report"]["agreement"]["tokens"] for row in found if row["state"] == "ready"]
        assert set(ready) == {9}
        # A trainer that is not what it pushes is stopped.
        path = "/admin/v1/tenants/held/adapters/policy/series"
        rules = checked(client.get(path))
        kept = {name: rules[name] for name in ("keep_last", "check_every", "config")}
        checked(client.put(path, json=kept | {"agree_within": 1e-12}))
    callback = SeriesCallback("policy", agree_on=TOKENS, url=tiny.server.data_url, api_key=key)
    with pytest.raises(SeriesFailed, match="422 agreement_exceeded"):
        train(tiny_model, tmp_path / "out", callback)
    assert callback.pushed == []


def test_a_refusal_ends_the_training(tiny: Shop, tiny_model: Path, tmp_path: Path) -> None:
    tiny.server.create_tenant("other")
    key = tiny.server.create_key("other", scopes=["inference", "adapters:train"])
    for rules, code in ((None, "404 series_not_found"), ({"keep_last": 2}, "403 insufficient_scope")):
        callback = SeriesCallback("policy", rules=rules, url=tiny.server.data_url, api_key=key)
        with pytest.raises(SeriesFailed, match=code):
            train(tiny_model, tmp_path / "out", callback)
        assert callback.pushed == []
