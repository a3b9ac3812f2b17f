"""The real model: our forward pass beside transformers', along longer answers than those of
tests/engine/model/test_peft_equality.py, whose base rows are compared in the same way."""

from __future__ import annotations

import pytest
import torch

from loraplex.adapters.end_tokens import read_end_tokens
from loraplex.engine.model.base import Model
from loraplex.kernels.linear.dense import multiplies
from support.models.checkpoints import PagedRun
from support.models.loading import load_model

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea, then explain each line of it in one sentence.",
    "List three prime numbers above 100 and say how you checked them.",
]
ANSWER_TOKENS = 40


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Teams of threads of several test processes on few cores wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(real_model_dir) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]


def theirs(model_dir, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@pytest.fixture(scope="module")
def exact(real_model_dir, prompts):
    """Prompts with transformers' greedy answers in float32, and the logits of all their positions."""
    model = theirs(real_model_dir, torch.float32)
    full, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS,
                min_new_tokens=ANSWER_TOKENS, do_sample=False, repetition_penalty=1.0, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
            full.append(answer[0].tolist())
            logits.append(model(answer).logits[0].float())
    return full, logits


def teacher_forced(model: Model, full: list[list[int]], num_prompts: list[int]) -> list[torch.Tensor]:
    """Logits of every position: prompts in chunks beside each other's decoding, then token by token."""
    run = PagedRun(model, full)
    while alive := [i for i, p in enumerate(full) if run.done[i] < len(p)]:
        run.step({i: max(1, min(13, num_prompts[i] - run.done[i])) for i in alive})
    return [run.result(i) for i in range(len(full))]


@pytest.mark.soak
def test_float32_greedy_tokens_equal_transformers(real_model_dir, prompts, exact):
    full, logits = exact
    model = load_model(real_model_dir, "cpu", "float32")
    for ours, want, tokens, prompt in zip(
        teacher_forced(model, full, [len(p) for p in prompts]), logits, full, prompts, strict=True
    ):
        assert (ours - want).abs().max() <= 1e-3
        assert ours[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]


@pytest.mark.soak
def test_bfloat16_is_as_near_to_float32_as_transformers(real_model_dir, prompts, exact):
    """In log probabilities: bfloat16 shifts all logits of a position by up to 0.7 too, which is in no answer."""
    full, logits = exact
    if not multiplies(torch.bfloat16, torch.device("cpu")):
        pytest.skip(
            "torch cannot multiply in bfloat16 on this processor: transformers' answers would take minutes"
        )
    model = load_model(real_model_dir, "cpu")
    assert model.dtype is torch.bfloat16
    ours = torch.cat(teacher_forced(model, full, [len(p) for p in prompts])).log_softmax(-1)
    peer = theirs(real_model_dir, torch.bfloat16)
    with torch.inference_mode():
        rounded = torch.cat([peer(torch.tensor([tokens])).logits[0].float() for tokens in full]).log_softmax(
            -1
        )
    want = torch.cat(logits).log_softmax(-1)
    error, peers_error = (ours - want).pow(2).mean().sqrt(), (rounded - want).pow(2).mean().sqrt()
    assert error <= 1.5 * peers_error, f"{error:.4f} against {peers_error:.4f}"
    worst, peers_worst = (ours - want).abs().max(), (rounded - want).abs().max()
    assert worst <= 1.5 * peers_worst, f"{worst:.3f} against {peers_worst:.3f}"


def test_end_of_answer_ids(real_model_dir):
    assert read_end_tokens(real_model_dir).ids == (2,)
