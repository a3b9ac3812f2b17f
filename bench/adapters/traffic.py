"""Streamed requests for adapters of a running server, and what was seen of them in a window of time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import httpx
import msgspec

from loraplex.app.bench.report import percentile
from loraplex.app.sse import SseParser
from support.adapters.drafts import ALL_SITES

WORDS = ("river", "stone", "paper", "light", "garden", "engine", "winter", "number", *ALL_SITES)
STATES = ("hot", "warm", "cold")


@dataclass(frozen=True)
class Question:
    """One request: the adapter's name, its tenant's key, the prompt, and the tokens of the answer. With `logprobs` 0,
    the log probabilities of the answer's tokens are asked for."""

    model: str
    key: str
    prompt: str
    max_tokens: int
    logprobs: int | None = None


@dataclass
class Answer:
    """What a client saw of one request. Times are of time.perf_counter; `due` is when it should have been sent.
    `state` is the tier on which the server found the adapter, `version` the one that answered."""

    question: Question
    due: float
    state: str = ""
    version: str = ""
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tokens: int = 0
    done: float = 0.0
    error: str | None = None

    @property
    def said(self) -> tuple[str, tuple[float, ...]]:
        """What was answered, to be compared."""
        return self.text, tuple(self.logprobs)

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.due


class Questions:
    """Draws questions from a seed: prompts that differ from each other, and answers of uniform lengths."""

    def __init__(
        self, seed: int, *, words: tuple[int, int] = (8, 64), tokens: tuple[int, int] = (16, 112)
    ) -> None:
        self._rng = random.Random(f"{seed}/questions")
        self._words, self._tokens = words, tokens

    def draw(self, model: str, key: str) -> Question:
        rng = self._rng
        prompt = f"{rng.random()} " + " ".join(rng.choices(WORDS, k=rng.randint(*self._words)))
        return Question(model, key, prompt, rng.randint(*self._tokens))


async def ask(client: httpx.AsyncClient, question: Question, due: float) -> Answer:
    """Never raises for what the server or the network does."""
    answer = Answer(question, due)
    body = {
        "model": question.model, "prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if question.logprobs is not None:
        body["logprobs"] = question.logprobs
    headers = {"authorization": f"Bearer {question.key}", "content-type": "application/json"}
    content = msgspec.json.encode(body)
    try:
        async with client.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            answer.state = response.headers.get("x-loraplex-adapter-state", "")
            answer.version = response.headers.get("x-loraplex-adapter", "")
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
            else:
                await _read(answer, response)
    except httpx.HTTPError as error:
        answer.error = repr(error)
    answer.done = time.perf_counter()
    return answer


async def _read(answer: Answer, response: httpx.Response) -> None:
    parser, whole = SseParser(), False
    async for chunk in response.aiter_raw():
        now = time.perf_counter()
        for data in parser.feed(chunk):
            if data == "[DONE]":
                whole = True
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                answer.error = str(event["error"])
            for choice in event.get("choices", ()):
                if choice["text"]:
                    answer.arrivals.append(now)
                    answer.text += choice["text"]
                if choice.get("logprobs"):
                    answer.logprobs += choice["logprobs"]["token_logprobs"]
            if usage := event.get("usage"):
                answer.tokens = usage["completion_tokens"]
    if not whole:
        answer.error = answer.error or "the stream was cut"
    elif answer.error is None and not answer.arrivals:
        answer.arrivals.append(time.perf_counter())  # tokens without text


def open_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits)


async def keep_asking(
    client: httpx.AsyncClient, questions: Iterator[Question], until: Callable[[], bool], answers: list[Answer]
) -> None:
    """One stream: asks the next question when the last is answered, until `until`."""
    while not until():
        answers.append(await ask(client, next(questions), time.perf_counter()))


async def ask_at(
    client: httpx.AsyncClient, questions: Iterator[Question], times: Iterable[float], answers: list[Answer]
) -> None:
    """Asks the next question at each of these times, whatever has been answered; ends when all are answered."""

    async def one(question: Question, due: float) -> None:
        answers.append(await ask(client, question, due))

    async with asyncio.TaskGroup() as group:
        for due in times:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(next(questions), due))


@dataclass
class Seen:
    """Answers of windows of time: all that were due in one, and the tokens that came in one, whosever."""

    answers: list[Answer] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, answers: Iterable[Answer], begin: float, end: float) -> float:
        """A window more. Returns its output tokens a second."""
        tokens = 0.0
        for answer in answers:
            if answer.error is not None:
                self.errors[answer.error[:200]] += 1
                continue
            inside = sum(begin <= at < end for at in answer.arrivals)
            tokens += answer.tokens * inside / len(answer.arrivals)
            if begin <= answer.due < end:
                self.answers.append(answer)
        self.tokens += tokens
        self.seconds += end - begin
        return tokens / (end - begin)

    def first_token_ms(self, q: float, state: str | None = None) -> float:
        """The q-th percentile of the times to the first token; nan where there is none."""
        waits = sorted(a.first_token_s for a in self.answers if state in (None, a.state))
        return percentile(waits, q) * 1e3 if waits else float("nan")

    def shares(self) -> dict[str, float]:
        """Of the requests, by the tier on which their adapter was found."""
        counts = Counter(answer.state for answer in self.answers)
        return {state: counts[state] / max(1, len(self.answers)) for state in STATES}
