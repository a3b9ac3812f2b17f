"""What the engine computes is what transformers and PEFT compute, on the real model with real adapters.

All adapters and base rows go through one engine at once, their prompts in chunks beside others' decodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from support.local_engine import LocalEngine
from support.peft_zoo import ZOO, PeftReference, make_zoo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

SHIPPED = ("pirate", "json", "sentiment")
NUM_OUTPUTS = 8
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


@pytest.fixture(scope="module")
def adapters(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shipped = {name: Path(__file__).parents[2] / "examples" / "adapters" / name for name in SHIPPED}
    return shipped | make_zoo(real_model_dir, tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def prompts(real_model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def reference32(real_model_dir: Path, adapters: dict[str, Path]) -> PeftReference:
    return PeftReference(real_model_dir, adapters, torch.float32)


def mixed_run(
    engine: LocalEngine,
    recorder: Recorder,
    adapters: dict[str, Path],
    prompts: list[list[int]],
    *,
    on_every_prompt: Collection[str | None] = (None, *SHIPPED),
    **sampling: Any,
) -> dict[tuple[str | None, int], tuple[list[int], torch.Tensor]]:
    """Every adapter and the base on the last prompt, which comes in chunks, and those named on every prompt, in one
    engine at once: (tokens, [outputs, V] logits)."""
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    rows: dict[str, list[torch.Tensor]] = {}
    asked = [
        (name, number)
        for name in (None, *adapters)
        for number in range(len(prompts))
        if number == len(prompts) - 1 or name in on_every_prompt
    ]
    for name, number in asked:
        engine.add(f"{name}/{number}", prompts[number], None if name is None else refs[name], **sampling)
    submit = engine.built.runner.submit

    def noting_submit(plan: Any) -> Any:
        before = len(recorder.logits)
        handle = submit(plan)
        handle.future.result()
        if len(recorder.logits) > before:
            # One row for each sequence, by slot: what does not sample is looked at for numbers that are not finite.
            for item, row in zip(
                sorted(plan.scheduled, key=lambda s: s.slot), recorder.logits[-1], strict=True
            ):
                if item.samples:
                    rows.setdefault(item.seq.request_id, []).append(row)
        recorder.adapters_per_step.append(len({s.slot for s in plan.scheduled if s.slot >= 0}))
        return handle

    engine.built.runner.submit = noting_submit  # type: ignore[method-assign]
    engine.run()
    engine.core.check_integrity()
    return {
        (name, number): (engine.tokens(f"{name}/{number}"), torch.stack(rows[f"{name}/{number}"]))
        for name, number in asked
    }


@pytest.fixture
def engine_of(real_model_dir: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[LocalEngine] = []

    def make(dtype: str, **settings: Any) -> tuple[LocalEngine, Recorder]:
        recorders: list[Recorder] = []

        def wrap(model: Any) -> Any:
            recorders.append(Recorder(model))
            return recorders[0]

        engine = LocalEngine(
            real_model_dir,
            tmp_path,
            wrap_model=wrap,
            dtype=dtype,
            kv_cache_memory=512 << 20,
            adapter_memory=256 << 20,
            **settings,
        )
        made.append(engine)
        return engine, recorders[0]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("lookahead", "on_every_prompt"),
    # PEFT's own DoRA takes several times as long: the further kinds have one prompt each.
    [(0, (None, *SHIPPED)), pytest.param(1, (None, *SHIPPED, *ZOO), marks=pytest.mark.soak)],
)
def test_float32_tokens_and_logits_equal_peft(
    engine_of: Any,
    adapters: dict[str, Path],
    prompts: list[list[int]],
    reference32: PeftReference,
    lookahead: int,
    on_every_prompt: tuple[str | None, ...],
) -> None:
    engine, recorder = engine_of("float32", max_num_batched_tokens=192, max_num_seqs=40, lookahead=lookahead)
    results = mixed_run(
        engine, recorder, adapters, prompts, on_every_prompt=on_every_prompt, max_tokens=NUM_OUTPUTS
    )
    assert max(recorder.adapters_per_step) >= 8, "the adapters did not share steps"
    worst = 0.0
    for (name, number), (tokens, logits) in results.items():
        prompt = prompts[number]
        expected = reference32.logits(name, prompt + tokens)[len(prompt) - 1 : -1]
        # Each the likeliest after those before it: what PEFT would have generated, token by token.
        assert len(tokens) == NUM_OUTPUTS
        assert tokens == expected.argmax(-1).tolist(), f"{name} on prompt {number}"
        worst = max(worst, float((logits - expected).abs().max()))
    print(f"float32, lookahead {lookahead}: worst logit error {worst:.2e} over {len(results)} sequences")
    assert worst <= 1e-3


def test_bfloat16_error_is_within_one_and_a_half_times_pefts(
    engine_of: Any,
    real_model_dir: Path,
    adapters: dict[str, Path],
    prompts: list[list[int]],
    reference32: PeftReference,
) -> None:
    """Teacher-forced along our own bf16 tokens, both against float32."""
    engine, recorder = engine_of("bfloat16", max_num_batched_tokens=192, max_num_seqs=40)
    results = mixed_run(engine, recorder, adapters, prompts, max_tokens=NUM_OUTPUTS)
    theirs16 = PeftReference(real_model_dir, adapters, torch.bfloat16)
    ours, theirs = [], []
    for (name, number), (tokens, logits) in results.items():
        prompt = prompts[number]
        exact = reference32.logits(name, prompt + tokens)[len(prompt) - 1 : -1]
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
