"""Log probabilities and echo over HTTP, with the openai client: in OpenAI's shapes, and in step with the text."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.generation.planning import MAX_LOGPROBS
from loraplex.api.openai.echo import Echo
from loraplex.api.openai.logprobs import ScoredToken
from support.engine.fake_engine import Reply, fake_row
from support.engine.logprobs import pack_logprobs
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.models.byte_tokenizer import EOS_ID, START_ID

HI: Any = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("<user\nhi>\n<assistant\n")
TEXT = "Ahoy wörld ⚓!"


def chat_entries(plane: DataPlane, text: str, num_top: int) -> list[dict[str, Any]]:
    """What must be told of a text, a token a byte."""
    start = len(plane.engine.requests[-1].prompt_ids)
    entries = []
    for place, byte in enumerate(text.encode(), start):
        own, top = fake_row(byte, place, num_top)

        def one(token_id: int, logprob: float) -> dict[str, Any]:
            return {"token": token_name(token_id), "logprob": logprob, "bytes": token_bytes(token_id)}

        entries.append({**one(byte, own), "top_logprobs": [one(*entry) for entry in top]})
    return entries


def token_name(token_id: int) -> str:
    names = {256: "<|end|>", 257: "<|start|>", 258: "<|pad|>", 259: "<think>"}
    if token_id in names:
        return names[token_id]
    return chr(token_id) if token_id < 128 else f"\\x{token_id:02x}"


def token_bytes(token_id: int) -> list[int] | None:
    return list(b"<think>") if token_id == 259 else [token_id] if token_id < 256 else None


@pytest.mark.parametrize("num_top", [None, 0, 2, 20])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chat(plane: DataPlane, num_top: int | None, chunk: int) -> None:
    plane.engine.script(Reply(text=TEXT, chunk=chunk))
    options: Any = {} if num_top is None else {"top_logprobs": num_top}
    answer = plane.client().chat.completions.create(model=BASE, messages=HI, logprobs=True, **options)
    (choice,) = answer.choices
    assert choice.message.content == TEXT
    assert choice.logprobs is not None
    assert choice.logprobs.refusal is None
    told = [entry.model_dump() for entry in choice.logprobs.content or []]
    assert told == chat_entries(plane, TEXT, num_top or 0)  # not of the token that ended the turn
    assert plane.engine.requests[-1].sampling.logprobs == (num_top or 0)
    assert plane.engine.requests[-1].sampling.prompt_logprobs is None


def test_nobody_asks_nothing_is_told(plane: DataPlane) -> None:
    for options in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        answer = plane.client().chat.completions.create(model=BASE, messages=HI, **options)  # type: ignore[call-overload]
        assert answer.choices[0].logprobs is None
        assert plane.engine.requests[-1].sampling.logprobs is None
    assert plane.client().completions.create(model=BASE, prompt="x").choices[0].logprobs is None


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("stop", [None, ["⚓"], ["wörx", "ld ⚓!!"], ["y wö"], ["A"]])
def test_a_stream_tells_of_tokens_with_their_text(plane: DataPlane, chunk: int, stop: Any) -> None:
    plane.engine.script(Reply(text=TEXT, chunk=chunk), Reply(text=TEXT, chunk=chunk))
    asked: Any = {"model": BASE, "messages": HI, "logprobs": True, "top_logprobs": 1, "stop": stop}
    whole = plane.client().chat.completions.create(**asked).choices[0]
    text, told = "", b""
    entries = []
    for part in plane.client().chat.completions.create(stream=True, **asked):
        (choice,) = part.choices
        text += choice.delta.content or ""
        for entry in (choice.logprobs.content or []) if choice.logprobs is not None else ():
            entries.append(entry)
            told += bytes(entry.bytes or [])
        assert text.encode().startswith(told), "a token was told of before its text"
        # Nor is one forgotten: what is shown and not told is a piece of one token, and a token is a byte here.
        assert told == text.encode()
    assert text == whole.message.content
    assert entries == (whole.logprobs.content if whole.logprobs else None)
    assert text == (TEXT if stop is None or stop[0] not in TEXT else TEXT.split(stop[0])[0])
    assert [entry.model_dump() for entry in entries] == chat_entries(plane, text, 1)


def test_parts_of_a_character_are_told_with_it(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="⚓"))
    chunks = plane.client().chat.completions.create(model=BASE, messages=HI, logprobs=True, stream=True)
    told = [part.choices[0].logprobs for part in chunks]
    (entries,) = [logprobs.content for logprobs in told if logprobs is not None]
    assert [entry.token for entry in entries or []] == ["\\xe2", "\\x9a", "\\x93"]
    assert bytes(byte for entry in entries or [] for byte in entry.bytes or []).decode() == "⚓"
    # One that is never completed is told at the end, with the mark that stands for it.
    plane.engine.script(Reply(token_ids=(65, 0xE2, 0x9A)))
    (choice,) = plane.client().chat.completions.create(model=BASE, messages=HI, logprobs=True).choices
    assert choice.message.content == "A\ufffd"
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content or []] == ["A", "\\xe2", "\\x9a"]


def test_control_tokens_have_a_name_and_no_bytes(plane: DataPlane) -> None:
    plane.engine.script(Reply(token_ids=(65, START_ID, 66), eos=False, finish_reason="length"))
    (choice,) = plane.client().chat.completions.create(model=BASE, messages=HI, logprobs=True).choices
    assert choice.message.content == "AB"
    assert choice.logprobs is not None
    assert [(entry.token, entry.bytes) for entry in choice.logprobs.content or []] == [
        ("A", [65]), ("<|start|>", None), ("B", [66]),
    ]  # fmt: skip


def completion_lists(token_ids: list[int], starts: list[int], first: int, num_top: int) -> dict[str, Any]:
    """What must be told of tokens at places `first` … of their sequence; nothing of the very first."""

    def name(token_id: int) -> str:
        name = token_name(token_id)
        return f"bytes:{name}" if 128 <= token_id < 256 else name

    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": starts}
    for place, token_id in enumerate(token_ids, first):
        own, top = fake_row(token_id, place, num_top)
        told["tokens"].append(name(token_id))
        told["token_logprobs"].append(own if place else None)
        told["top_logprobs"].append(
            {name(token_id): own} | {name(other): value for other, value in top} if place else None
        )
    return told


def byte_starts(text: str, offset: int = 0) -> list[int]:
    return [offset + index for index, char in enumerate(text) for _ in char.encode()]


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(plane: DataPlane, num_top: int, stream: bool) -> None:
    plane.engine.script(Reply(text=TEXT, chunk=3))
    (choice,) = complete(plane, stream, prompt="hi", logprobs=num_top)
    assert choice["text"] == TEXT
    # The token that ends the answer is told as well, behind the text.
    starts = [*byte_starts(TEXT), len(TEXT)]
    assert choice["logprobs"] == completion_lists([*TEXT.encode(), EOS_ID], starts, 2, num_top)


def complete(plane: DataPlane, stream: bool, **asked: Any) -> list[dict[str, Any]]:
    """Choices, put together from chunks where they stream; what is told of a token is never ahead of its text."""
    if not stream:
        answer = plane.client().completions.create(model=BASE, **asked)
        return [choice.model_dump() for choice in answer.choices]
    choices: dict[int, dict[str, Any]] = {}
    for part in plane.client().completions.create(model=BASE, stream=True, **asked):
        for chunk in part.choices:
            choice = choices.setdefault(chunk.index, {"text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "a chunk after the end"
            choice["text"] += chunk.text
            choice["finish_reason"] = chunk.finish_reason
            if chunk.logprobs is not None:
                logprobs = chunk.logprobs.model_dump()
                ends = choice["finish_reason"] == "stop"
                assert max(logprobs["text_offset"]) < max(1, len(choice["text"]) + ends)
                told = choice["logprobs"] = choice["logprobs"] or {name: [] for name in logprobs}
                for name, values in logprobs.items():
                    told[name] += values
    return [choices[index] for index in sorted(choices)]


PROMPT = "The ⚓ is"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_with_logprobs(plane: DataPlane, stream: bool, n: int, as_tokens: bool) -> None:
    prompts = [PROMPT, "x", "ÄÖ"]
    answers = [TEXT, "", "."]
    plane.engine.script(*(Reply(text=text, chunk=4) for text in answers for _ in range(n)))
    given = [list(prompt.encode()) for prompt in prompts] if as_tokens else prompts
    choices = complete(plane, stream, prompt=given, n=n, echo=True, logprobs=2)
    assert len(choices) == 3 * n
    for index, choice in enumerate(choices):
        prompt, text = prompts[index // n], answers[index // n]
        assert choice["text"] == prompt + text
        starts = [*byte_starts(prompt), *byte_starts(text, len(prompt)), len(prompt + text)]
        assert choice["logprobs"] == completion_lists([*(prompt + text).encode(), EOS_ID], starts, 0, 2)
        assert choice["finish_reason"] == "stop"
    scored = [request.sampling.prompt_logprobs for request in plane.engine.requests]
    assert scored == [2, *[None] * (n - 1)] * 3, "a prompt is scored once"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["eos", "length", "stop string"])
def test_an_echo_has_an_entry_for_each_token_that_usage_counts(
    plane: DataPlane, stream: bool, ending: str
) -> None:
    """lm-eval asks for one token more than the text that it scores, and cuts the last entry off."""
    answers = {"eos": Reply(text=""), "length": Reply(text="x", eos=False, finish_reason="length")}
    plane.engine.script(answers.get(ending, Reply(text="#")))
    (choice,) = complete(plane, stream, prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, stop=["#"])
    scored = len(PROMPT.encode())
    assert len(choice["logprobs"]["token_logprobs"]) == scored + (ending != "stop string")
    expected = completion_lists(list(PROMPT.encode()), byte_starts(PROMPT), 0, 1)
    for name, values in expected.items():
        assert choice["logprobs"][name][:scored] == values


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone(plane: DataPlane, stream: bool) -> None:
    plane.engine.script(Reply(text=" big."), Reply(text=" blue."))
    choices = complete(plane, stream, prompt=PROMPT, n=2, echo=True, stop=["⚓", "is"])
    assert [choice["text"] for choice in choices] == [f"{PROMPT} big.", f"{PROMPT} blue."]
    assert [choice["logprobs"] for choice in choices] == [None, None]
    assert plane.engine.requests[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_and_nothing_generated(plane: DataPlane, stream: bool) -> None:
    plane.engine.script(Reply(text=TEXT), Reply(text=TEXT), Reply(text=TEXT))
    (choice,) = complete(plane, stream, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"] == completion_lists(list(PROMPT.encode()), byte_starts(PROMPT), 0, 1)
    (choice,) = complete(plane, stream, prompt=PROMPT, max_tokens=0, echo=True)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    # A prompt may fill the context then, and only then.
    (choice,) = complete(plane, stream, prompt="x" * MAX_MODEL_LEN, max_tokens=0, echo=True)
    assert len(choice["text"]) == MAX_MODEL_LEN
    for asked in ({"max_tokens": 0, "prompt": "x" * (MAX_MODEL_LEN + 1)}, {"prompt": "x" * MAX_MODEL_LEN}):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(plane, stream, echo=True, **asked)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_control_tokens_of_a_prompt_are_spelled_as_they_were_written(plane: DataPlane) -> None:
    written = "<|start|>user\nhi<|end|>"
    ids = [START_ID, *b"user\nhi", EOS_ID]
    for prompt in (written, ids):
        (choice,) = complete(plane, False, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        assert plane.engine.requests[-1].prompt_ids == tuple(ids)
        assert choice["text"] == written
        assert choice["logprobs"]["tokens"][0] == "<|start|>"
        assert choice["logprobs"]["text_offset"] == [0, *range(9, 16), 16]


def test_usage_and_reservation_count_prompts_once_and_choices_each(plane: DataPlane) -> None:
    plane.engine.script(*[Reply(text="abc")] * 6)
    asked: Any = {"model": BASE, "prompt": ["hi", "hello"], "echo": True, "logprobs": 1, "n": 3}
    usage = plane.client().completions.create(**asked, max_tokens=7).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 6 * 4)
    usage = plane.client().completions.create(**asked, max_tokens=0).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 0, 7)
    plane.settle_all()
    reserved = list(plane.limiter.reserved.values())
    assert [(r["prompt_tokens"], r["asked_tokens"], r["n"]) for r in reserved] == [(7, 7, 6), (7, 0, 6)]
    assert [used for _, used in plane.limiter.settled] == [31, 7]


def test_an_answer_that_could_hold_too_many_is_refused_before_any_work(plane: DataPlane) -> None:
    most = MAX_LOGPROBS // 16 // 21
    client = plane.client()
    chat: Any = {"model": BASE, "messages": HI, "logprobs": True, "n": 16, "top_logprobs": 20}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat, max_tokens=most + 1)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=BASE, prompt=["x" * (MAX_MODEL_LEN - 1)] * 16, echo=True, logprobs=5, max_tokens=1, n=16
        )
    assert caught.value.param == "logprobs"
    assert plane.engine.requests == []
    assert plane.limiter.reserved == {}
    client.chat.completions.create(**chat, max_tokens=most)


def test_an_error_while_the_prompt_is_scored(plane: DataPlane) -> None:
    """Of the choice that scores it: all end. The others wait for it."""
    plane.engine.script(Reply(text="a"), Reply(error=("adapter_unavailable", "no room")))
    with pytest.raises(openai.InternalServerError) as caught:
        complete(plane, False, prompt=PROMPT, n=2, echo=True, logprobs=1)
    assert caught.value.status_code == 503
    plane.settle_all()


def test_equally_likely_tokens_begin_with_the_one_that_came(plane: DataPlane) -> None:
    text = plane.services.text
    echo = Echo(text.spell([65, 66, 67]), [65, 66, 67], scored=True)
    rows = [(-0.5, [(1, -0.5), (2, -0.5)]), (-0.5, [(67, -0.25), (2, -0.5)])]
    told, tokens = echo.take(pack_logprobs(rows, 2))
    assert (told, echo.complete) == ("ABC", True)
    assert tokens is not None
    assert [list(token.alternatives) for token in tokens] == [
        [], [(66, -0.5), (1, -0.5)], [(67, -0.25), (2, -0.5)],
    ]  # fmt: skip


@given(st.lists(st.integers(-3, 0), min_size=1, max_size=6), st.integers(0, 8), st.integers(-4, 0))
def test_alternatives_stay_in_order_whichever_token_was_sampled(
    values: list[int], token_id: int, own: int
) -> None:
    """Tokens 0, 1, … with falling values; the one that came is among them, or no likelier than the last."""
    values.sort(reverse=True)
    top = tuple((index, float(value)) for index, value in enumerate(values))
    logprob = float(values[token_id]) if token_id < len(top) else float(min(own, values[-1]))
    found = list(ScoredToken(token_id, logprob, top, 0).alternatives)
    assert [value for _, value in found] == values
    assert len({other for other, _ in found}) == len(top)
    if logprob >= values[-1]:
        assert found[values.index(int(logprob))][0] == token_id
    assert {other for other, _ in found} - {token_id} <= set(range(len(top)))


@pytest.mark.parametrize("cuts", [[1], [2, 3], [4, 5], [1, 2, 3, 4, 5, 6], []])
def test_an_echo_goes_out_in_step_whatever_the_pieces(plane: DataPlane, cuts: list[int]) -> None:
    prompt = list("a⚓ß!".encode())  # characters of 1, 3, 2 and 1 tokens
    rows = [(-float(place), []) for place in range(1, len(prompt))]
    echo = Echo(plane.services.text.spell(prompt), prompt, scored=True)
    text, tokens = echo.take(None)
    told = list(tokens or ())
    for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        piece, tokens = echo.take(pack_logprobs(rows[start:end], 0))
        text += piece
        told += tokens or ()
        assert bytes(token.token_id for token in told) == text.encode()
    assert (text, echo.complete) == ("a⚓ß!", True)
    assert [token.logprob for token in told] == [None, *(own for own, _ in rows)]
    assert [token.offset for token in told] == [0, 1, 1, 1, 2, 2, 3]
