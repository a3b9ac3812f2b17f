"""What each outside client must have told of its conversation (tests/clients/scripts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.engine.fake_engine import EOS_ID, fake_row

BAD = {"langchain": "OpenAIInvalidRequestError", "litellm": "BadRequestError", "node": "BadRequestError"}
TOO_LONG = {
    "langchain": "OpenAIContextOverflowError",
    "litellm": "ContextWindowExceededError",
    "node": "BadRequestError",
}
LENGTH_FIELD = {"langchain": "max_completion_tokens", "litellm": "max_tokens", "node": "max_tokens"}
"""Under which name a client sends its `max_tokens`."""


def error(kind: str, status: int | None, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"class": kind, "status": status, "code": code, "param": param}


def refusals(client: str) -> Mapping[str, Any]:
    """The error class that a client made of each refusal, and what it kept of our answer; on any server. LiteLLM
    keeps code and field of some errors only."""

    def bad(param: str) -> dict[str, Any]:
        return error(BAD[client], 400, "unsupported_field", param)

    def too_long(param: str, kind: str) -> dict[str, Any]:
        kept = (None, None) if client == "litellm" else ("context_length_exceeded", param)
        return error(kind, 400, *kept)

    known = client != "litellm"
    prefix = "OpenAI" if client == "langchain" else ""
    missing = {"langchain": "OpenAIModelNotFoundError"}.get(client, "NotFoundError")
    found: dict[str, Any] = {
        "wrong_key": error(f"{prefix}AuthenticationError", 401, "invalid_api_key" if known else None),
        "unknown_model": error(missing, 404, *(("model_not_found", "model") if known else ())),
        "tools": bad("tools"),
        "structured": bad("response_format.json_schema.strictness"),
        "too_long": too_long("messages", TOO_LONG[client]),
        "far_too_long": too_long("messages", TOO_LONG[client]),
        "answer_too_long": too_long(
            # LangChain's class is for what a shorter prompt would mend.
            LENGTH_FIELD[client],
            BAD[client] if client == "langchain" else TOO_LONG[client],
        ),
        "embeddings": "1.0000",  # its length
    }
    if client == "langchain":
        found["structured_function_calling"] = bad("tools")
    if client == "node":
        found["run_tools"] = bad("tools")
    return found


def _name(byte: int) -> str:
    return chr(byte) if byte < 128 else f"\\x{byte:02x}"


def chat_logprobs(text: str, num_prompt: int) -> list[dict[str, Any]]:
    """What the scripted engine tells of an answer, a token a byte, with two alternatives each."""

    def one(byte: int, logprob: float) -> dict[str, Any]:
        return {"token": _name(byte), "logprob": logprob, "bytes": [byte]}

    told = []
    for place, byte in enumerate(text.encode(), num_prompt):
        own, top = fake_row(byte, place, 2)
        told.append({**one(byte, own), "top": [one(*likely) for likely in top]})
    return told


def echo_logprobs(text: str) -> dict[str, Any]:
    """What it tells of a prompt and its answer, and of the token that ends it, with one alternative each: the token
    itself. Nothing of the first."""
    data = text.encode()
    names = [_name(byte) if byte < 128 else f"bytes:{_name(byte)}" for byte in data] + ["<|end|>"]
    own = [fake_row(token, place, 1)[0] if place else None for place, token in enumerate([*data, EOS_ID])]
    return {
        "tokens": names,
        "token_logprobs": own,
        "top_logprobs": [value and {name: value} for name, value in zip(names, own, strict=True)],
        "text_offset": [*(index for index, char in enumerate(text) for _ in char.encode()), len(text)],
    }


def scripted(client: str, text: str, num_prompt: int) -> Mapping[str, Any]:
    """Every check over a scripted engine that always says `text` to a question of `num_prompt` tokens, a token a
    byte."""
    size = len(text.encode()) + 1  # and the end of the turn
    told = {"text": text, "finish": "stop", "prompt": num_prompt, "completion": size}
    streamed = {**told, "pieces": len(text)}
    cut = {"text": text[:3], "finish": "length", "prompt": num_prompt, "completion": 3}
    before = text[: text.index("wö")]
    stopped = {
        "text": before,
        "finish": "stop",
        "prompt": num_prompt,
        "completion": len(f"{before}wö".encode()),
    }
    waited = {"answer": text, "waited": True}
    limited = "OpenAIRateLimitError" if client == "langchain" else "RateLimitError"
    own = client != "litellm"
    found: dict[str, Any] = {
        **refusals(client),
        "chat": told,
        "stream": streamed,
        "base": text,
        "turns": {"first": text, "second": text},
        "turns_prompt": (
            f"system\nBe brief.\nuser\nWhat do you think?\nassistant\n{text}\nuser\nAnd then?\nassistant\n"
        ),
        "developer": text,
        "developer_prompt": "system\nBe brief.\nuser\nWhat do you think of the sea?\nassistant\n",
        "completion": text,
        "completion_stream": text,
        "n": [text, text],
        "logprobs": {how: chat_logprobs(text, num_prompt) for how in ("whole", "streamed")},
        "echo": {"text": f"The sea is{text}", "logprobs": echo_logprobs(f"The sea is{text}")},
        "sampling": {
            "prompt": "user\nWhat do you think of the sea?\nassistant\n",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "seed": 7,
            "logit_bias": [[65, -100]],
            "max_tokens": 16,
        },
        "length": cut,
        "stop": stopped,
        "stop_stream": {**stopped, "pieces": len(before)},
        "rate_limit": error(limited, 429, "rate_limit_exceeded" if own else "429"),
        "rate_limit_retried": waited,
        "drain_retried": waited,
        "overload_retried": waited,
        "restart_retried": waited,
        # One of four refusals was met: `x-should-retry: false` is heeded.
        "quota": {**error(limited, 429, "insufficient_quota" if own else "429"), "refusals_left": 3},
        "hang_up": {"text": "Ar", "freed": True},
        "breaks": {**error("APIError", None, "engine_restarting"), "seen": "abc"},
    }
    if client == "langchain":
        found |= {
            "tool_history": text,
            "responses": text,
            "batch": [text] * 3,
            "async": {"whole": told, "streamed": told, "batch": [text] * 2},
            "fallbacks": text,
            "num_tokens": 3,
        }
        return found
    found |= {"models": ["json", "org/tiny", "pirate"], "max_completion_tokens": cut}
    if client == "litellm":
        found |= {
            "async": {"whole": told, "streamed": streamed},
            "hosted_vllm": told,
            "fallbacks": text,
            "router": text,
            "breaks": {**error("MidStreamFallbackError", 500), "seen": "abc"},
        }
    else:
        found |= {
            "responses": text,
            "card": "pirate",
            "headers": {"id": "mine-1", "adapter": "pirate@v2"},
            "stream_helper": told,
            "abort": {**error("APIUserAbortError", None), "freed": True},
        }
    return found
