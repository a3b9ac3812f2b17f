"""What the engine computes is what transformers and PEFT compute, on the real model.

The shipped adapters run on the whole model, one adapter of each kind on its first layers: a kind goes the same way in
every layer. The long version has all of them on the whole model. Adapters and base rows go through one engine at once,
their prompts in chunks beside others' decodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from loraplex.engine.pooling import POOLINGS, Pooling
from loraplex.kernels.linear.dense import multiplies
from support.adapters.peft_zoo import PeftReference, cut_model, make_zoo
from support.engine.local_engine import LocalEngine
from support.simulator.core_integrity import check_core

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

SHIPPED = ("pirate", "json", "sentiment")
NUM_OUTPUTS = 8
NUM_LAYERS = 6
"""Of the model that the kinds of adapters run on."""
QUESTIONS = (
    "What do you think of the sea?",
    "I can't stand this hotel room. Everything about it made me angry. Tell me why in one word.",
    "Tell me about owls. " * 10,
)


class Recorder:
    """A model that keeps the logits of every row that was sampled, by (request, output index) order of calls."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: list[torch.Tensor] = []
        self.adapters_per_step: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self._model.forward(batch)
        self.logits.append(logits.float().clone())
        return logits


@dataclass(frozen=True)
class Subject:
    """A model, its adapters, and which of the prompts each of them is asked."""

    model_dir: Path
    adapters: dict[str, Path]
    asked: tuple[int, ...]
    min_adapters_per_step: int

    @functools.cached_property
    def _reference32(self) -> PeftReference:
        return PeftReference(self.model_dir, self.adapters, torch.float32)

    @functools.cached_property
    def _computed(self) -> dict[tuple[str | None, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def exact(
        self, name: str | None, prompt: list[int], tokens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In float32, [len(tokens), V]: the logits that each of the tokens is chosen by; [len(prompt), C]: the hidden
        states of the prompt. Both dtypes are compared with them, mostly along the same tokens."""
        key = name, tuple(prompt + tokens)
        if key not in self._computed:
            logits, hidden = self._reference32.logits_and_hidden(name, prompt + tokens)
            self._computed[key] = logits[len(prompt) - 1 : -1].clone(), hidden[: len(prompt)].clone()
        return self._computed[key]


@pytest.fixture(scope="module")
def subject_of(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """By name, "shipped", "kinds" or "all", each made once."""
    shipped = {name: Path(__file__).parents[3] / "examples" / "adapters" / name for name in SHIPPED}
    every, longest = tuple(range(len(QUESTIONS))), (len(QUESTIONS) - 1,)

    @functools.cache
    def make(name: str) -> Subject:
        if name == "shipped":
            return Subject(real_model_dir, shipped, every, len(shipped))
        folder = tmp_path_factory.mktemp("zoo")
        if name == "kinds":
            model_dir = cut_model(real_model_dir, folder / "model", NUM_LAYERS)
            return Subject(model_dir, make_zoo(model_dir, folder), longest, 8)
        return Subject(real_model_dir, shipped | make_zoo(real_model_dir, folder), every, 8)

    return make


@pytest.fixture(scope="module")
def prompts(real_model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids for q in QUESTIONS
    ]


def mixed_run(
    engine: LocalEngine,
    recorder: Recorder,
    subject: Subject,
    prompts: list[list[int]],
    poolings: Sequence[Pooling] = (),
) -> dict[tuple[str | None, int], tuple[list[int], torch.Tensor]]:
    """Every adapter and the base, in one engine at once: (tokens, [outputs, V] logits). The last prompt comes in
    chunks. Behind each is a request for its prompt's embedding, of one of these poolings in turns."""
    refs = {name: engine.publish(folder, name=name) for name, folder in subject.adapters.items()}
    rows: dict[str, list[torch.Tensor]] = {}
    asked = [(name, number) for name in (None, *subject.adapters) for number in subject.asked]
    for place, (name, number) in enumerate(asked):
        adapter = None if name is None else refs[name]
        engine.add(f"{name}/{number}", prompts[number], adapter, max_tokens=NUM_OUTPUTS)
        if poolings:
            pooling = poolings[place % len(poolings)]
            engine.embed(f"{name}/{number}/{pooling}", prompts[number], adapter, pooling)
    submit = engine.built.runner.submit

    def noting_submit(plan: Any) -> Any:
        before = len(recorder.logits)
        handle = submit(plan)
        handle.future.result()
        if len(recorder.logits) > before:
            # One row for each sequence, by slot: what does not sample is looked at for numbers that are not finite.
            generating = [item for item in plan.scheduled if item.pool_start is None]
            for item, row in zip(sorted(generating, key=lambda s: s.slot), recorder.logits[-1], strict=True):
                if item.samples:
                    rows.setdefault(item.request_id, []).append(row)
        recorder.adapters_per_step.append(len({s.slot for s in plan.scheduled if s.slot >= 0}))
        return handle

    engine.built.runner.submit = noting_submit  # type: ignore[method-assign]
    engine.run()
    check_core(engine.core)
    return {
        (name, number): (engine.tokens(f"{name}/{number}"), torch.stack(rows[f"{name}/{number}"]))
        for name, number in asked
    }


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[Any]:
    made: list[LocalEngine] = []

    def make(model_dir: Path, dtype: str, **settings: Any) -> tuple[LocalEngine, Recorder]:
        recorders: list[Recorder] = []

        def wrap(model: Any) -> Any:
            recorders.append(Recorder(model))
            return recorders[0]

        engine = LocalEngine(
            model_dir,
            tmp_path,
            wrap_model=wrap,
            dtype=dtype,
            kv_cache_memory=512 << 20,
            adapter_memory=256 << 20,
            max_num_batched_tokens=192,
            max_num_seqs=40,
            **settings,
        )
        made.append(engine)
        return engine, recorders[0]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("name_of_subject", "lookahead"),
    [("shipped", 0), ("kinds", 0), pytest.param("all", 1, marks=pytest.mark.soak)],
)
def test_float32_tokens_and_logits_equal_peft(
    engine_of: Any,
    subject_of: Callable[[str], Subject],
    prompts: list[list[int]],
    name_of_subject: str,
    lookahead: int,
) -> None:
    subject = subject_of(name_of_subject)
    engine, recorder = engine_of(subject.model_dir, "float32", lookahead=lookahead)
    results = mixed_run(engine, recorder, subject, prompts, POOLINGS)
    assert max(recorder.adapters_per_step) >= subject.min_adapters_per_step, (
        "the adapters did not share steps"
    )
    worst = worst_hidden = 0.0
    pooled = {"mean": lambda hidden: hidden.mean(0), "last": lambda hidden: hidden[-1]}
    pooled["cls"] = lambda hidden: hidden[0]
    for place, ((name, number), (tokens, logits)) in enumerate(results.items()):
        prompt = prompts[number]
        expected, hidden = subject.exact(name, prompt, tokens)
        # Each the likeliest after those before it: what PEFT would have generated, token by token.
        assert len(tokens) == NUM_OUTPUTS
        assert tokens == expected.argmax(-1).tolist(), f"{name} on prompt {number}"
        worst = max(worst, float((logits - expected).abs().max()))
        pooling = POOLINGS[place % len(POOLINGS)]
        embedding, vector = engine.embedding(f"{name}/{number}/{pooling}"), pooled[pooling](hidden)
        worst_hidden = max(worst_hidden, float((embedding - vector).abs().max()))
        assert torch.cosine_similarity(embedding, vector, dim=0) > 1 - 1e-6, f"{name} on prompt {number}"
    print(
        f"float32, lookahead {lookahead}: worst error of a logit {worst:.2e}, of an embedding {worst_hidden:.2e}, "
        f"over {len(results)} sequences"
    )
    assert worst <= 1e-3
    assert worst_hidden <= 1e-3


@pytest.mark.parametrize(
    "name_of_subject",
    ["shipped", *(pytest.param(name, marks=pytest.mark.soak) for name in ("kinds", "all"))],
)
def test_bfloat16_error_is_within_one_and_a_half_times_pefts(
    engine_of: Any, subject_of: Callable[[str], Subject], prompts: list[list[int]], name_of_subject: str
) -> None:
    """Teacher-forced along our own bf16 tokens, both against float32."""
    if not multiplies(torch.bfloat16, torch.device("cpu")):
        pytest.skip("torch cannot multiply in bfloat16 on this processor: PEFT's answers would take minutes")
    subject = subject_of(name_of_subject)
    engine, recorder = engine_of(subject.model_dir, "bfloat16")
    results = mixed_run(engine, recorder, subject, prompts)
    theirs16 = PeftReference(subject.model_dir, subject.adapters, torch.bfloat16)
    ours, theirs = [], []
    for (name, number), (tokens, logits) in results.items():
        prompt = prompts[number]
        exact, _ = subject.exact(name, prompt, tokens)
        rounded = theirs16.logits(name, prompt + tokens)[len(prompt) - 1 : -1]
        ours.append(float((logits - exact).pow(2).mean().sqrt()))
        theirs.append(float((rounded - exact).pow(2).mean().sqrt()))
        assert ours[-1] <= 2.5 * theirs[-1], (
            f"{name} on prompt {number}: {ours[-1]:.4f} against {theirs[-1]:.4f}"
        )
    ratio = sum(ours) / sum(theirs)
    print(
        f"bfloat16: RMS logit error {sum(ours) / len(ours):.4f}, PEFT's {sum(theirs) / len(theirs):.4f}, "
        f"ratio {ratio:.3f}"
    )
    assert ratio <= 1.5
