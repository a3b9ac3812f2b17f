"""What grammars cost on a CPU: steps of rows with a grammar, without, and mixed, in turns.

    PYTHONPATH=tests python -m bench.grammars MODEL [--rows 16] [--tokens 64] [--turns 5] [--kernels numba]
        [--threads N]

MODEL is a directory with a tokenizer, such as SmolLM2-135M-Instruct's. The engine is the real one, in this process. All
rows sample at temperature 1 and none ends: the grammars are arrays of objects with more elements than there are tokens.
For each kind of batch: the median of the tokens a second over the turns, and its ratio to that of the rows without a
grammar of the same turn. Of a mixed batch half of the rows have one, and its tokens a second are those of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the engine's process has it

from loraplex.engine.types import EngineRequest, SamplingParams
from support.engine.local_engine import LocalEngine

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 4},
    },
    "required": ["id", "name", "kind", "tags"],
    "additionalProperties": False,
}
KINDS = {"without": 0, "mixed": 2, "with": 1}
"""Each n-th row has a grammar; 0: none."""


def grammar(min_items: int, number: int) -> str:
    """Another text for each row, so that none is built once for several."""
    schema = {"type": "array", "items": ITEM, "minItems": min_items, "description": str(number)}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def run_batch(engine: LocalEngine, rows: int, tokens: int, every: int, names: itertools.count[int]) -> float:
    """Tokens a second, from the moment when all rows have their first token."""
    asked = []
    for row in range(rows):
        text = grammar(tokens, row) if every and row % every == 0 else None
        name = f"{next(names)}"
        params = SamplingParams(tokens, seed=row, ignore_eos=True)
        engine.core.add_request(EngineRequest(name, "bench", (1, 2, 3 + row), params, grammar=text))
        asked.append(name)
    while any(name not in engine.events for name in asked):
        engine.step()
    before = sum(len(event.token_ids) for name in asked for event in engine.events[name])
    begin = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - begin
    made = [len(engine.tokens(name)) for name in asked]
    assert made == [tokens] * rows, "a row has ended early"
    for name in asked:
        del engine.events[name]
    return (sum(made) - before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kernels", default="numba")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {given.rows} rows, {given.tokens} tokens")
    names = itertools.count()
    with tempfile.TemporaryDirectory() as work:
        engine = LocalEngine(
            given.model,
            Path(work),
            kernels=given.kernels,
            max_num_seqs=given.rows,
            max_model_len=1024,
            num_threads=given.threads,
        )
        try:
            for every in KINDS.values():
                run_batch(
                    engine, given.rows, given.tokens, every, names
                )  # the first of each builds and compiles
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(given.turns):
                for kind, every in KINDS.items():
                    rates[kind].append(run_batch(engine, given.rows, given.tokens, every, names))
        finally:
            engine.close()
    for kind, found in rates.items():
        ratios = [rate / plain for rate, plain in zip(found, rates["without"], strict=True)]
        print(
            f"{kind} a grammar: {statistics.median(found):.1f} tokens/s, ratio {statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
