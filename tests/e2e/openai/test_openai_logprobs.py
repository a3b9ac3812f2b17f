"""Log probabilities, echo and choices on the real model, asked for with the openai client: every number against
transformers and PEFT. tests/api/openai/test_logprobs.py has every shape."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from tokenizers import Tokenizer

from loraplex.serving.text.processor import TextProcessor
from support.adapters.peft_zoo import PeftReference
from support.servers.live_server import EXAMPLE_ADAPTERS, SERVED_NAME, Shop

pytestmark = pytest.mark.slow

MODELS = (SERVED_NAME, "pirate")
QUESTION = "What do you think of the sea?"
CHAT_PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. Winston Smith, his chin nuzzled"
TOLERANCE = 1e-4


@dataclass
class Truth:
    """transformers and PEFT in float32, and the tokenizer."""

    peft: PeftReference
    tokenizer: Tokenizer
    ids: dict[bytes, int]
    worst: float = 0.0

    def logprobs(self, model: str, tokens: list[int]) -> torch.Tensor:
        """[len(tokens) - 1, V]: of what follows each but the last."""
        return self.peft.logits(None if model == SERVED_NAME else model, tokens).log_softmax(-1)[:-1]

    def compare(self, told: float, exact: torch.Tensor) -> None:
        self.worst = max(self.worst, abs(told - float(exact)))
        assert abs(told - float(exact)) <= TOLERANCE


@pytest.fixture(scope="module")
def truth(real_model_dir: Path) -> Iterator[Truth]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = TextProcessor(real_model_dir, max_model_len=8192).table.token_bytes
    found = Truth(
        PeftReference(real_model_dir, {"pirate": EXAMPLE_ADAPTERS / "pirate"}, torch.float32),
        Tokenizer.from_file(str(real_model_dir / "tokenizer.json")),
        {data: token_id for token_id, data in enumerate(table) if data},
    )
    yield found
    torch.set_num_threads(threads)
    print(f"\nover HTTP, float32: worst error of a log probability {found.worst:.1e}")


def checked(kind: type[BaseModel], answer: BaseModel) -> Any:
    """As the client has it, strictly, and with nothing in it that the client does not know."""
    given = answer.model_dump()
    for choice in given["choices"] if kind is Completion else ():
        # Null is OpenAI's for the first token of a prompt, and missing in the client's type.
        for name, none in (("token_logprobs", 0.0), ("top_logprobs", {})):
            values = (choice["logprobs"] or {}).get(name)
            if values and values[0] is None:
                values[0] = none
    known = kind.model_validate(given, strict=True)
    found = [known]
    while found:
        value: Any = found.pop()
        if isinstance(value, BaseModel):
            assert not value.model_extra, value
            found += [getattr(value, name) for name in type(value).model_fields]
        elif isinstance(value, list):
            found += value
    return known


def near(value: Any) -> Any:
    """Equal to it except rounding, which depends on the rest of the batch."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: near(item) for name, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def entries(logprobs: Any) -> list[dict[str, Any]]:
    return [] if logprobs is None else [entry.model_dump() for entry in logprobs.content]


def ask_chat(shop: Shop, stream: bool, **asked: Any) -> list[dict[str, Any]]:
    """Text, log probabilities and end of each choice; of a stream put together."""
    given = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "logprobs": True, **asked}
    create = shop.openai().chat.completions.create
    if not stream:
        answer = checked(ChatCompletion, create(**given))
        return [
            {"text": c.message.content, "told": entries(c.logprobs), "end": c.finish_reason}
            for c in answer.choices
        ]
    choices = [{"text": "", "told": [], "end": None} for _ in range(asked.get("n", 1))]
    for part in create(stream=True, **given):
        for c in checked(ChatCompletionChunk, part).choices:
            choice = choices[c.index]
            choice["text"] += c.delta.content or ""
            choice["told"] += entries(c.logprobs)
            choice["end"] = c.finish_reason or choice["end"]
            told = b"".join(bytes(entry["bytes"] or ()) for entry in choice["told"])
            assert choice["text"].startswith(told.decode(errors="replace")), "told ahead of the text"
    return choices


@pytest.mark.parametrize("model", MODELS)
def test_chat_equals_transformers_and_peft(real: Shop, truth: Truth, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 12, "top_logprobs": 20}
    (whole,) = ask_chat(real, False, **asked)
    (streamed,) = ask_chat(real, True, **asked)
    assert streamed == near(whole)
    assert (len(whole["told"]), whole["end"]) == (12, "length")
    prompt = truth.tokenizer.encode(CHAT_PROMPT).ids
    answer = [truth.ids[bytes(entry["bytes"])] for entry in whole["told"]]
    expected = truth.logprobs(model, prompt + answer)[len(prompt) - 1 :]
    assert answer == expected.argmax(-1).tolist()
    for entry, row, token_id in zip(whole["told"], expected, answer, strict=True):
        truth.compare(entry["logprob"], row[token_id])
        assert [entry["token"], entry["logprob"]] == [
            entry["top_logprobs"][0]["token"],
            entry["top_logprobs"][0]["logprob"],
        ]
        for likely, value in zip(entry["top_logprobs"], row.topk(20).values, strict=True):
            truth.compare(likely["logprob"], value)
            truth.compare(likely["logprob"], row[truth.ids[bytes(likely["bytes"])]])
    assert "".join(entry["token"] for entry in whole["told"]) == whole["text"]


def complete(shop: Shop, stream: bool = False, **asked: Any) -> tuple[list[dict[str, Any]], Any]:
    """Choices in the order of their indices, and the usage."""
    given = {"model": "pirate", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, **asked}
    create = shop.openai().completions.create
    if not stream:
        answer = create(**given)
        checked(Completion, answer)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.model_dump(exclude={"index"}) for choice in answer.choices], answer.usage
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for part in create(stream=True, stream_options={"include_usage": True}, **given):
        assert usage is None, "something after the usage"
        usage = part.usage
        assert (usage is None) == bool(part.choices)
        for c in part.choices:
            logprobs = None if c.logprobs is None else c.logprobs.model_dump()
            fresh = {
                "finish_reason": None,
                "logprobs": logprobs and {name: [] for name in logprobs},
                "text": "",
            }
            choice = choices.setdefault(c.index, fresh)
            choice["text"] += c.text
            choice["finish_reason"] = c.finish_reason or choice["finish_reason"]
            for name, values in (logprobs or {}).items():
                choice["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)], usage


def check_completion(truth: Truth, model: str, tokens: list[int], told: dict[str, Any], num_top: int) -> None:
    """What is told of the last tokens of these."""
    expected = truth.logprobs(model, tokens)
    pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    for place, (own, top) in enumerate(pairs, len(tokens) - len(told["tokens"])):
        if place == 0:
            assert (own, top) == (None, None)
            continue
        row = expected[place - 1]
        truth.compare(own, row[tokens[place]])
        best = sorted(top.values(), reverse=True)
        assert num_top <= len(best) <= num_top + 1
        for value, exact in zip(best[:num_top], row.topk(num_top).values, strict=True):
            truth.compare(value, exact)


@pytest.mark.parametrize("model", ["pirate", pytest.param(SERVED_NAME, marks=pytest.mark.soak)])
def test_an_echo_is_scored_alike_with_a_warm_prefix_cache(real: Shop, truth: Truth, model: str) -> None:
    prompt = truth.tokenizer.encode(PROMPT).ids
    assert len(prompt) > 16
    _, usage = complete(real, model=model)
    _, again = complete(real, model=model)
    assert again.prompt_tokens_details.cached_tokens >= 16
    asked: dict[str, Any] = {"model": model, "echo": True, "logprobs": 5}
    first, _ = complete(real, **asked)
    second, usage = complete(real, **asked)
    streamed, of_stream = complete(real, True, **asked)
    assert second == near(first)
    assert streamed == near(first)
    assert usage == of_stream
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 6)
    told = first[0]["logprobs"]
    tokens = [truth.ids[token.encode()] for token in told["tokens"]]
    assert tokens[: len(prompt)] == prompt
    check_completion(truth, model, tokens, told, 5)
    assert "".join(told["tokens"]) == first[0]["text"]
    assert first[0]["text"].startswith(PROMPT)
    ends = [*told["text_offset"][1:], len(first[0]["text"])]
    assert told["tokens"] == [first[0]["text"][a:b] for a, b in zip(told["text_offset"], ends, strict=True)]
    # Nothing generated: the prompt's part of the same.
    (scored,), usage = complete(real, max_tokens=0, **asked)
    assert (scored["text"], scored["finish_reason"], usage.completion_tokens) == (PROMPT, "length", 0)
    assert scored["logprobs"] == near({name: values[: len(prompt)] for name, values in told.items()})


@pytest.mark.parametrize("model", ["pirate", pytest.param(SERVED_NAME, marks=pytest.mark.soak)])
def test_prompts_and_named_tokens_equal_transformers_and_peft(real: Shop, truth: Truth, model: str) -> None:
    """As vLLM has them: `prompt_logprobs`, `logprob_token_ids` and `return_token_ids`."""
    named = [truth.ids[word] for word in (b" the", b" sea", b"!", b"\n")]
    extra = {"prompt_logprobs": 3, "logprob_token_ids": named, "return_token_ids": True}
    asked: dict[str, Any] = {"model": model, "max_tokens": 5, "temperature": 0, "n": 2, "extra_body": extra}
    chat = real.openai().chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], logprobs=True, **asked
    )
    complete(real, model=model)  # the prefix cache is warm
    completion = real.openai().completions.create(prompt=PROMPT, logprobs=0, **asked)
    of_chat = chat.model_extra or {}
    assert of_chat["prompt_token_ids"] == truth.tokenizer.encode(CHAT_PROMPT).ids
    of_choice = completion.choices[1].model_extra or {}
    assert of_choice["prompt_token_ids"] == truth.tokenizer.encode(PROMPT).ids
    assert of_choice["prompt_logprobs"] == (completion.choices[0].model_extra or {})["prompt_logprobs"]
    for told, answer in ((of_chat, chat.choices[0].model_extra or {}), (of_choice, of_choice)):
        prompt, output = told["prompt_token_ids"], answer["token_ids"]
        expected = truth.logprobs(model, prompt + output)
        first, *others = told["prompt_logprobs"]
        assert first is None
        for place, entries_ in enumerate(others):
            row, token_id = expected[place], prompt[place + 1]
            assert next(iter(entries_)) == str(token_id)
            assert len(entries_) in (3, 4)
            for other, entry in entries_.items():
                truth.compare(entry["logprob"], row[int(other)])
                near_ranks = [int((row >= row[int(other)] + shift).sum()) for shift in (1e-3, -1e-3)]
                assert near_ranks[0] <= entry["rank"] <= near_ranks[1]
                text = truth.tokenizer.decode([int(other)], skip_special_tokens=False)
                assert entry["decoded_token"] == text or "\ufffd" in text
    expected = truth.logprobs(model, of_chat["prompt_token_ids"] + chat.choices[0].model_extra["token_ids"])  # type: ignore[index]
    for place, entry in enumerate(entries(chat.choices[0].logprobs)):
        row = expected[len(of_chat["prompt_token_ids"]) - 1 + place]
        own, *likely = entry["top_logprobs"]
        assert own == {name: entry[name] for name in ("token", "logprob", "bytes")}
        ids = [truth.ids[bytes(other["bytes"])] for other in likely]
        assert ids == [token_id for token_id in named if token_id != truth.ids[bytes(own["bytes"])]]
        for token_id, other in zip(ids, likely, strict=True):
            truth.compare(other["logprob"], row[token_id])
    expected = truth.logprobs(model, of_choice["prompt_token_ids"] + of_choice["token_ids"])
    logprobs = completion.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    for place, top in enumerate(logprobs.top_logprobs):
        row = expected[len(of_choice["prompt_token_ids"]) - 1 + place]
        assert len(top) in (len(named), 1 + len(named))
        for token, value in top.items():
            truth.compare(value, row[truth.ids[token.encode()]])


def test_choices_of_a_seed_are_distinct_and_come_again(real: Shop, truth: Truth) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1, "echo": True, "logprobs": 1}
    first, usage = complete(real, **asked)
    again, _ = complete(real, True, **asked)
    assert again == near(first)
    assert len({choice["text"] for choice in first}) == 3
    prompt = truth.tokenizer.encode(PROMPT).ids
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 18)
    for choice in first:
        told = choice["logprobs"]
        tokens = prompt + [truth.ids[token.encode()] for token in told["tokens"][len(prompt) :]]
        check_completion(truth, "pirate", tokens, told, 1)
        assert {name: values[: len(prompt)] for name, values in told.items()} == {
            name: values[: len(prompt)] for name, values in first[0]["logprobs"].items()
        }
    other, _ = complete(real, **{**asked, "seed": 12})
    assert not {choice["text"] for choice in other} & {choice["text"] for choice in first}


DECIDED = {
    "chat": ["Yes", "No", "Yes, of course", "It depends on the weather", "\n"],
    "text": [" was", " had", " held", " into his breast", " into his"],
}


def decide(shop: Shop, model: str, kind: str, stream: bool = False) -> tuple[Any, Any]:
    """What is told of each choice, and how the answer ended."""
    extra = {"structured_outputs": {"choice": DECIDED[kind]}}
    asked: dict[str, Any] = {"model": model, "max_tokens": 1, "extra_body": extra, "stream": stream}
    client = shop.openai()
    if kind == "chat":
        answer: Any = client.chat.completions.create(
            messages=[{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=2, **asked
        )
    else:
        answer = client.completions.create(prompt=PROMPT, logprobs=1, **asked)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    (choice,) = [choice for choice in choices if choice.finish_reason]
    return choice.model_extra["choice_probabilities"], choice


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("model", MODELS)
def test_probabilities_of_choices_equal_transformers_and_peft(
    real: Shop, truth: Truth, model: str, kind: str
) -> None:
    """Of one token and of several, alone and beside other answers, streamed and not."""
    prompt = truth.tokenizer.encode(CHAT_PROMPT if kind == "chat" else PROMPT).ids
    alone, choice = decide(real, model, kind)
    with ThreadPoolExecutor(6) as threads:
        beside = [threads.submit(complete, real, model=other, max_tokens=24) for other in MODELS * 2]
        decided = [threads.submit(decide, real, model, kind, stream) for stream in (False, True)]
        for future in decided:
            assert future.result()[0] == alone
        for other in beside:
            other.result()
    total = 0.0
    for entry, written in zip(alone, DECIDED[kind], strict=True):
        tokens = truth.tokenizer.encode(written).ids
        assert (entry["choice"], entry["token_ids"]) == (written, tokens)
        rows = truth.logprobs(model, prompt + tokens)[len(prompt) - 1 :]
        exact = sum(row[token] for row, token in zip(rows, tokens, strict=True))
        truth.compare(entry["logprob"], exact)
        truth.compare(entry["raw_probability"], exact.exp())
        total += float(exact.exp())
    for entry in alone:
        assert entry["probability"] == pytest.approx(entry["raw_probability"] / total, abs=TOLERANCE)
    text = choice.message.content if kind == "chat" else choice.text
    assert choice.finish_reason == ("stop" if text in DECIDED[kind] else "length")
    assert any(written.startswith(text) for written in DECIDED[kind])
