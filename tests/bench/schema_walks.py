"""Random texts of the grammars of a folder of schemas, judged by the `jsonschema` package. No model, no server.

    PYTHONPATH=tests python -m bench.schema_walks FOLDER [--schemas 1000] [--walks 3]

FOLDER is as for `bench.structured_output`. Where a file has "tests" with "data" and "valid", as those of
JSONSchemaBench have, the grammar is asked about them too. Each schema has a process of its own, for 20 s of processor
time at most. Prints how many texts fit their schema, and what is refused and why. Ends with 1 if a text that does not
fit is taken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.schema_rules import locate
from support.models.json_judge import verdict
from support.models.matching import takes
from support.models.walking import walk

CPU_S = 20


def judge(path: Path, walks: int) -> tuple[Counter[str], str, list[str]]:
    """What was counted, the reason of a refusal, and the texts that were taken wrongly."""
    found: Counter[str] = Counter()
    given = json.loads(path.read_text("utf-8"))
    schema = given.get("schema", given) if isinstance(given, dict) else given
    try:
        grammar = builders.json_schema(schema)
        if reason := LLMatcher.validate_grammar(grammar, LLTokenizer("byte")):
            place, words = locate(schema, str(reason))
            found["refused, with a place" if place else "refused"] += 1
            return found, words, []
    except GrammarRefused as error:
        found["refused, with a place" if error.path else "refused"] += 1
        return found, error.message, []
    found["accepted"] += 1
    wrong = []
    for example in given.get("tests", ()) if "schema" in given else ():
        text = json.dumps(example["data"], ensure_ascii=False)
        if not example["valid"] and takes(grammar, text) and verdict(schema, text) == "wrong":
            wrong.append(text)
        found["valid examples, not taken"] += example["valid"] and not takes(grammar, text)
        found["valid examples"] += bool(example["valid"])
    chance = random.Random(path.name)
    for _ in range(walks):
        text = walk(grammar, chance)
        judged = "too long" if text is None else verdict(schema, text)
        found[f"texts: {judged}"] += 1
        if judged == "wrong":
            wrong.append(str(text))
    return found, "", wrong


def _judge_into(pipe: Any, path: Path, walks: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    pipe.send(judge(path, walks))


def main() -> None:
    parser = argparse.ArgumentParser(description="Random texts of schemas' grammars, judged by jsonschema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--walks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.rglob("*.json"))
    random.Random(arguments.seed).shuffle(paths)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    fork = multiprocessing.get_context("fork")
    for path in paths[: arguments.schemas]:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_judge_into, args=(theirs, path, arguments.walks))
        process.start()
        theirs.close()
        try:
            found, reason, texts = ours.recv()
        except EOFError:
            counts["not judged within its time"] += 1
            continue
        finally:
            process.join()
        counts += found
        reasons.update([reason[:60]] if reason else [])
        wrong += [(path.name, text) for text in texts]
    for what, number in sorted(counts.items()):
        print(f"{what}: {number}")
    for reason, number in reasons.most_common(20):
        print(f"  {number} × {' '.join(reason.split())}")
    for name, text in wrong:
        print(f"wrong: {name}: {text[:300]!r}")
    sys.exit(int(bool(wrong)))


if __name__ == "__main__":
    main()
