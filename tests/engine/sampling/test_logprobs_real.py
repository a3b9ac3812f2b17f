"""Log probabilities on the real model are transformers' and PEFT's own, in a mixed batch: the long version of
test_logprobs.py, and of tests/e2e/openai/test_openai_logprobs.py, which asks the real model over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from loraplex.engine.logprobs import Logprobs, Scores, join_scores
from support.adapters.peft_zoo import PeftReference
from support.engine.local_engine import LocalEngine

pytestmark = pytest.mark.soak

EXAMPLES = Path(__file__).parents[3] / "examples" / "adapters"
ADAPTERS = {name: EXAMPLES / name for name in ("pirate", "json")}
QUESTIONS = ("What do you think of the sea?", "Tell me about owls. " * 12, "Is it day or night?")
NAMED = (49_151, 0, 28_725, 198)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"logprobs": 20},
    {"logprobs": 5, "prompt_logprobs": 3},
    {"logprobs": 0, "logprob_token_ids": NAMED, "prompt_logprobs": 1, "prompt_ranks": True},
)
NUM_OUTPUTS = 8
FLOAT32_TOLERANCE = 1e-4


class Mixed:
    """Every question to the base and to every adapter, all in flight together: what was told of each token."""

    def __init__(self, real_model_dir: Path, work_dir: Path, dtype: str) -> None:
        tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
        prompts = [
            tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids
            for q in QUESTIONS
        ]
        engine = LocalEngine(
            real_model_dir,
            work_dir,
            dtype=dtype,
            kv_cache_memory=256 << 20,
            adapter_memory=64 << 20,
            max_num_batched_tokens=48,
            lookahead=1,
        )
        self.sequences: list[tuple[str | None, list[int], int, Scores]] = []
        try:
            refs = {None: None, **{name: engine.publish(folder) for name, folder in ADAPTERS.items()}}
            for name, ref in refs.items():
                for number, (prompt, options) in enumerate(zip(prompts, OPTIONS, strict=True)):
                    engine.add(f"{name}/{number}", prompt, ref, max_tokens=NUM_OUTPUTS, **options)
                engine.add(f"{name}/silent", prompts[0], ref, max_tokens=NUM_OUTPUTS)
            engine.run()
            for name in refs:
                for number, prompt in enumerate(prompts):
                    events = engine.events[f"{name}/{number}"]
                    scores = join_scores([event.scores for event in events if event.scores is not None])
                    assert scores is not None
                    tokens = engine.tokens(f"{name}/{number}")
                    self.sequences.append((name, prompt + tokens, len(prompt), scores))
                assert all(event.scores is None for event in engine.events[f"{name}/silent"])
                # In float32 no rounding depends on who else is in the batch.
                silent = engine.tokens(f"{name}/silent")
                assert dtype != "float32" or silent == engine.tokens(f"{name}/0")
        finally:
            engine.close()

    def worst_error(self, reference: PeftReference) -> float:
        errors = []
        for (name, tokens, num_prompt, scores), options in zip(
            self.sequences, OPTIONS * (1 + len(ADAPTERS)), strict=True
        ):
            expected = reference.logits(name, tokens).log_softmax(-1)
            answer, of_answer = tokens[num_prompt:], expected[num_prompt - 1 : -1]
            if "logprob_token_ids" in options:
                errors.append(_worst_named(scores.output, of_answer, answer))
            else:
                errors.append(_worst(scores.output, of_answer, answer, options["logprobs"]))
            if (num_top := options.get("prompt_logprobs")) is not None:
                prompt, of_prompt = tokens[1:num_prompt], expected[: num_prompt - 1]
                errors.append(_worst(scores.prompt, of_prompt, prompt, num_top))
            else:
                assert scores.prompt is None
        return max(errors)

    def check_ranks(self, reference: PeftReference) -> None:
        """Rounding may change a rank by the tokens that are as likely to a thousandth."""
        for (name, tokens, num_prompt, scores), options in zip(
            self.sequences, OPTIONS * (1 + len(ADAPTERS)), strict=True
        ):
            if "prompt_ranks" not in options:
                continue
            assert scores.prompt is not None
            logits = reference.logits(name, tokens)
            ranks = scores.prompt.token_ranks()
            for row, token, rank in zip(logits, tokens[1:num_prompt], ranks, strict=False):
                least, most = (int((row >= row[token] + shift).sum()) for shift in (1e-3, -1e-3))
                assert max(1, least) <= rank <= most
            assert len(ranks) == num_prompt - 1


def _worst(found: Logprobs | None, expected: torch.Tensor, tokens: list[int], num_top: int) -> float:
    """Against [n, V] log_softmax at the places of `tokens`: of these, of the best, and of the ids that are told."""
    assert found is not None
    assert (len(found), found.num_top) == (len(tokens), num_top)
    best = expected.topk(num_top).values
    worst = 0.0
    for place, (token, (own, top)) in enumerate(zip(tokens, found.rows(), strict=True)):
        own_exact = float(expected[place, token])
        of_ids = [float(expected[place, token_id]) for token_id, _ in top]
        told = [value for _, value in top]
        pairs = [
            (own, own_exact),
            *zip(told, best[place].tolist(), strict=True),
            *zip(told, of_ids, strict=True),
        ]
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    return worst


def _worst_named(found: Logprobs | None, expected: torch.Tensor, tokens: list[int]) -> float:
    assert found is not None
    worst = 0.0
    for place, (token, (own, named)) in enumerate(zip(tokens, found.rows(), strict=True)):
        assert tuple(token_id for token_id, _ in named) == NAMED
        exact = expected[place, [token, *NAMED]].tolist()
        told = (own, *(value for _, value in named))
        worst = max(worst, *(abs(a - b) for a, b in zip(told, exact, strict=True)))
    return worst


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several wait for each other more than they compute, on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exact(real_model_dir: Path) -> PeftReference:
    return PeftReference(real_model_dir, ADAPTERS, torch.float32)


def test_float32_equals_transformers_and_peft(
    real_model_dir: Path, exact: PeftReference, tmp_path: Path
) -> None:
    mixed = Mixed(real_model_dir, tmp_path, "float32")
    for name, tokens, num_prompt, _ in mixed.sequences:
        assert tokens[num_prompt:] == exact.logits(name, tokens)[num_prompt - 1 : -1].argmax(-1).tolist()
    mixed.check_ranks(exact)
    worst = mixed.worst_error(exact)
    print(f"\nfloat32: worst error of a log probability {worst:.1e}")
    assert worst <= FLOAT32_TOLERANCE


def test_bfloat16_is_as_near_to_float32_as_peft_is(
    real_model_dir: Path, exact: PeftReference, tmp_path: Path
) -> None:
    """Both round differently; neither is the other's yardstick."""
    mixed = Mixed(real_model_dir, tmp_path, "bfloat16")
    rounded = PeftReference(real_model_dir, ADAPTERS, torch.bfloat16)
    worst, own = mixed.worst_error(exact), 0.0
    for name, tokens, _, _ in mixed.sequences:
        a, b = (ref.logits(name, tokens).log_softmax(-1) for ref in (exact, rounded))
        likely = a.topk(20).indices
        own = max(own, float((a - b).gather(1, likely).abs().max()))
    print(f"\nbfloat16: worst error of a log probability {worst:.2f}; PEFT's own {own:.2f}")
    assert worst <= 1.5 * own
