"""lm-eval as it is shipped (`make clients`): its own command line against a running server, offline.

Its tasks come from a model hub; the ones here are written for the purpose, with a data set of a few lines: a choice
between answers, the likelihood of a text, and answers generated up to a line's end.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from support.clients.guidellm import offline_environment
from support.clients.outside_clients import INSTALLED

NAME = "lm_eval"
CHOICE, ROLLING, GENERATE = "tiny_choice", "tiny_rolling", "tiny_generate"
DOCUMENTS = (
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome", "Oslo"], "answer": 0},
    {"question": "Which animal barks?", "choices": ["the cat", "the dog", "the fish"], "answer": 1},
    {"question": "What colour is the sky at noon?", "choices": ["green", "red", "blue"], "answer": 2},
)
PROMPT = "Question: {{question}}\nAnswer:"
TASKS: Mapping[str, Mapping[str, Any]] = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": PROMPT,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    ROLLING: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[answer]}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    GENERATE: {
        "output_type": "generate_until",
        "doc_to_text": PROMPT,
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
TIMEOUT_S = 300.0


def evaluate(
    folder: Path,
    model: str,
    arguments: Mapping[str, object],
    tasks: Sequence[str],
    *options: str,
    key: str = "",
) -> dict[str, list[Any]]:
    """`lm_eval run --model MODEL`; each task's answers, in the documents' order.

    An answer is a number for a likelihood, a list of them for a choice, and else a text. Raises AssertionError with
    the end of what lm-eval printed if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tasks(folder)
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(INSTALLED / NAME / "bin" / "lm_eval"), "run", "--model", model, "--model_args", given]
    command += [
        "--tasks",
        ",".join(tasks),
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "out"),
    ]
    command += ["--log_samples", *options]
    environment = offline_environment() | {"OPENAI_API_KEY": key, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return {task: _answers(folder / "out", task) for task in tasks}


def _write_tasks(folder: Path) -> None:
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metadata": {"version": 1},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task}))


def _answers(out: Path, task: str) -> list[Any]:
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [_answer(task, row["resps"]) for row in rows]


def _answer(task: str, responses: list[list[Any]]) -> Any:
    if task == CHOICE:
        return [float(response[0][0]) for response in responses]
    ((first,),) = responses
    return float(first) if task == ROLLING else first
