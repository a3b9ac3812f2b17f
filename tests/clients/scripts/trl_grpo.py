"""TRL's GRPOTrainer, unchanged: rollouts come from a server, and each step is pushed to it. Prints a JSON object of
what each step came to."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import torch
from datasets import Dataset
from peft import LoraConfig
from series_callback import SeriesCallback
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

LENGTH = 24
"""Characters of a text that has the highest reward."""

given = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(given["model"])
callback = SeriesCallback(
    "policy",
    agree_on=[tokenizer.encode(text, add_special_tokens=False) for text in ("the sea is", "a long day")],
    rules={"keep_last": 2},
    url=given["url"],
    api_key=given["key"],
)
client = httpx.Client(
    base_url=given["url"], headers={"authorization": f"Bearer {given['key']}"}, timeout=60.0
)
sampled: list[dict[str, Any]] = []


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    """One answer of the newest version for each prompt; of the base before there is one."""
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    versions = set()
    for index, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        asked = {
            "model": "policy" if callback.pushed else given["base"],
            "prompt": ids,
            "max_tokens": trainer.max_completion_length,
            "temperature": trainer.temperature,
            "seed": 1000 * trainer.state.global_step + index,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = client.post("/v1/completions", json=asked)
        answer.raise_for_status()
        versions.add(answer.headers.get("x-loraplex-adapter"))
        [choice] = answer.json()["choices"]
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(choice["token_ids"])
        found["logprobs"].append(choice["logprobs"]["token_logprobs"][: len(choice["token_ids"])])
    sampled.append({"after": trainer.state.global_step, "versions": sorted(map(str, versions))})
    return found


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [-abs(LENGTH - len(text)) for text in completions]


torch.manual_seed(0)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
    reward_funcs=by_length,
    args=GRPOConfig(
        output_dir=given["out"],
        max_steps=given["steps"],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=32,
        learning_rate=0.02,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": ["the sea", "a day", "one", "two words"]}),
    processing_class=tokenizer,
    peft_config=LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    ),
    rollout_func=rollout,
    callbacks=[callback],
)
trainer.train()
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
pushed = [
    {"step": one.step, "version": one.version, "seconds": one.seconds, **one.agreement}
    for one in callback.pushed
]
print(json.dumps({"pushed": pushed, "sampled": sampled, "rewards": rewards}))
