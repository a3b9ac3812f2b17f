"""What a tenant sends that takes all it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STREAMS = 64
SENTENCE = "The quick brown fox jumps over the lazy dog. "
"""Ten tokens of SmolLM2's tokenizer."""
LONG_PROMPT = 600
"""Sentences: a prompt of 6,000 tokens."""
ACTIVATED = "activated"
"""The name of the adapter with an invocation."""
INVOCATION = "<|im_start|>assistant\n"
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


@dataclass(frozen=True)
class Mix:
    """Requests that are sent again whenever one ends."""

    title: str
    """Its row in the table."""
    body: dict[str, Any]
    """Fields of each request beside those that follow from the others."""
    sentences: int = 2
    """Of each prompt."""
    streams: int = STREAMS
    """Requests of each tenant at a time."""
    tenants: int = 1
    """Tenants that send."""
    prompts: int = 1
    """Prompts of each request."""
    inputs: int = 0
    """Inputs of one token each, of an embeddings request; 0: its inputs are the prompts."""
    path: str = "/v1/completions"
    """Where the requests go."""
    hang_up_s: float | None = None
    """Seconds after which the client goes away."""
    model: str = ""
    """The adapter that is asked; empty: the base."""
    ending: str = ""
    """The end of each prompt."""

    def asked(self, base: str, turns: Iterator[int]) -> dict[str, Any]:
        """The body of the next request. No two prompts begin alike: the prefix cache has none of them."""
        body = {"model": self.model or base, **self.body}
        if self.inputs:
            return body | {"input": [[5 + next(turns) % 9000] for _ in range(self.inputs)]}
        prompts = [f"{next(turns)}. {SENTENCE * self.sentences}{self.ending}" for _ in range(self.prompts)]
        if self.path == "/v1/embeddings":
            return body | {"input": prompts}
        return body | {"prompt": prompts, "stream": "prompt_logprobs" not in body}


def _dictated(regex: str) -> dict[str, Any]:
    return LONG | {"structured_outputs": {"regex": regex}}


EIGHT = {
    "long": Mix("4 prompts of 6,000 tokens", SHORT, LONG_PROMPT, streams=4),
    "hangups": Mix(
        "8 prompts of 6,000 tokens, given up after 0.4 s", SHORT, LONG_PROMPT, streams=8, hang_up_s=0.4
    ),
    "scores": Mix(
        "`prompt_logprobs` of 4 prompts of 6,000 tokens",
        {"max_tokens": 1, "prompt_logprobs": 1},
        LONG_PROMPT,
        streams=4,
    ),
    "means": Mix(
        "mean embeddings of 4 inputs of 6,000 tokens",
        {"pooling": "mean"},
        LONG_PROMPT,
        streams=4,
        path="/v1/embeddings",
    ),
    "activated": Mix(
        "activated LoRA behind 4 prompts of 6,000 tokens",
        SHORT,
        LONG_PROMPT,
        streams=4,
        model=ACTIVATED,
        ending=INVOCATION,
    ),
    "streams": Mix("64 streams of 4,000 tokens", LONG),
    "prompts": Mix("64 streams of 1,000 tokens in, 200 out", LONG | {"max_tokens": 200}, 100),
    "pattern": Mix("60 streams of `(x{100}[ab])*`", _dictated("(x{100}[ab])*"), streams=60),
}
"""One tenant's; each is a way of its own to fill a step."""
MIXES = EIGHT | {
    "batch": Mix("one request: 4 prompts, n = 16, 4,000 tokens", LONG | {"n": 16}, streams=1, prompts=4),
    "two": Mix("two tenants with 64 streams of 4,000 tokens each", LONG, tenants=2),
    "free": Mix("60 free streams of 4,000 tokens", LONG, streams=60),
    "literal": Mix("60 streams of `a{8000}b`", _dictated("a{8000}b"), streams=60),
    "embeddings": Mix(
        "2 requests of 1,024 inputs of one token", {}, streams=2, inputs=1024, path="/v1/embeddings"
    ),
}
STREAM = Mix("one stream", LONG, streams=1)
"""A neighbour of those whose throughput is measured."""
