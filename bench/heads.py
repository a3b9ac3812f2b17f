"""The throughput of classifiers beside that of embeddings, of the same versions in the same batches:

    PYTHONPATH=tests .venv/bin/python bench/heads.py MODEL_DIR [--versions 64] [--labels 8] [--tokens 48] [--pairs 7]

One engine in this process has as many versions as tenants, LoRA and a head each. A round asks every version for
a prompt that no cache knows. Rounds of classes and of vectors (`last`) take turns: the difference is the heads. One
thread computes, and its processor time counts, so that other programs of the machine do not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.pooling import Pooling
from support.adapters.drafts import TinyBase, draft_adapter
from support.engine.local_engine import LocalEngine


def base_of(model_dir: Path) -> TinyBase:
    """The sizes of a Llama checkpoint."""
    config = json.loads((model_dir / "config.json").read_text())
    heads = config["num_attention_heads"]
    return TinyBase(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
    )


def publish(engine: LocalEngine, base: TinyBase, work: Path, versions: int, labels: int) -> list[AdapterRef]:
    refs = []
    for number in range(versions):
        draft = draft_adapter(base, seed=number, scale=0.02, task_type="SEQ_CLS", modules_to_save=["score"])
        weight = np.random.default_rng(number).normal(0, 0.02, (labels, base.hidden))
        draft.tensors["base_model.model.score.weight"] = weight.astype(np.float32)
        folder = work / f"version-{number}"
        draft.write(folder)
        refs.append(engine.publish(folder, tenant=f"tenant-{number}", name="moods"))
    return refs


def seconds(
    engine: LocalEngine,
    refs: Sequence[AdapterRef],
    pooling: Pooling,
    tokens: int,
    rng: random.Random,
    vocab: int,
) -> float:
    """The processor's seconds that a round takes."""
    for number in range(len(refs)):
        prompt = [rng.randrange(vocab) for _ in range(tokens)]
        engine.embed(str(number), prompt, refs[number], pooling)
    begun = time.process_time()
    engine.run()
    took = time.process_time() - begun
    for number in range(len(refs)):
        engine.embedding(str(number))
    engine.events.clear()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--versions", type=int, default=64)
    parser.add_argument("--labels", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    base, rng = base_of(given.model), random.Random(1)
    with tempfile.TemporaryDirectory(prefix="heads-") as made:
        work = Path(made)
        engine = LocalEngine(
            given.model,
            work,
            num_threads=1,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            adapter_memory=512 << 20,
            adapter_cpu_memory=512 << 20,
            kv_cache_memory=256 << 20,
        )
        refs = publish(engine, base, work, given.versions, given.labels)
        ratios, rates = [], []
        for pair in range(given.pairs + 1):
            poolings: tuple[Pooling, Pooling] = ("classify", "last") if pair % 2 else ("last", "classify")
            took = {
                pooling: seconds(engine, refs, pooling, given.tokens, rng, base.vocab) for pooling in poolings
            }
            if pair:  # the first loads the adapters
                ratios.append(took["last"] / took["classify"])
                rates.append(len(refs) / took["classify"])
        engine.close()
    print(
        f"{given.versions} heads of {given.labels} labels, prompts of {given.tokens} tokens: "
        f"{statistics.median(rates):.1f} classes a second, {statistics.median(ratios):.3f} of the embeddings' "
        f"({min(ratios):.3f} … {max(ratios):.3f} in {given.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
