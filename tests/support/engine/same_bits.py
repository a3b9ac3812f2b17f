"""Questions asked of an engine among random neighbours, and the bits of what was computed for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from loraplex.engine import device_parts
from loraplex.engine.logprobs import join_scores
from loraplex.engine.types import ScheduledSequence
from support.engine.local_engine import LocalEngine


@dataclass(frozen=True, eq=False)
class Question:
    """`adapter` by its name, None for the base model. `pooled`: its embedding is asked for, not an answer."""

    prompt: tuple[int, ...]
    adapter: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False


@dataclass(frozen=True)
class Answer:
    """`logits`: of each output token, the bytes of what it was drawn from, float32. `scores`: of its log probabilities.
    `embedding`: of its values."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]
    scores: tuple[bytes, ...]
    embedding: bytes


class Recorder:
    """Keeps the logits of every sampled row, as the sampler gets them."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Any, list[tuple[str, int]]]] = {}
        self.logits: dict[str, dict[int, bytes]] = {}

    @contextmanager
    def patched(self) -> Iterator[None]:
        make = device_parts.make_sampler
        with mock.patch.object(
            device_parts, "make_sampler", lambda *args, **kwargs: self._wrap(make(*args, **kwargs))
        ):
            yield

    def _wrap(self, sampler: Any) -> Any:
        plan, sample = sampler.plan, sampler.sample

        def planned(rows: Sequence[ScheduledSequence], **options: Any) -> Any:
            batch = plan(rows, **options)
            # The batch is kept as well, so that no other one gets its id.
            self._rows[id(batch)] = batch, [(row.request_id, row.output_index) for row in rows]
            return batch

        def sampled(logits: torch.Tensor, batch: Any, *rest: Any) -> Any:
            _, rows = self._rows.pop(id(batch))
            for (request_id, index), values in zip(rows, logits, strict=True):
                self.logits.setdefault(request_id, {})[index] = values.numpy().tobytes()
            return sample(logits, batch, *rest)

        sampler.plan, sampler.sample = planned, sampled
        return sampler


class Asked:
    """An engine that questions are asked of, in any number at once."""

    def __init__(self, base: Path, work: Path, adapters: Mapping[str, Path], **settings: Any) -> None:
        work.mkdir()
        self._recorder = Recorder()
        with self._recorder.patched():
            self.engine = LocalEngine(base, work, **settings)
        # Of two tenants in turns: they preempt each other.
        self._refs = {
            name: self.engine.publish(folder, name=name, tenant="brook" if number % 2 else "acme")
            for number, (name, folder) in enumerate(adapters.items())
        }

    def add(self, name: str, question: Question) -> None:
        adapter = None if question.adapter is None else self._refs[question.adapter]
        if question.pooled:
            self.engine.embed(name, question.prompt, adapter)
        else:
            self.engine.add(name, question.prompt, adapter, **question.sampling)

    def take(self, name: str) -> Answer:
        """The answer of a request that has ended, and nothing is kept of it."""
        events = self.engine.events.pop(name)
        assert events[-1].finish_reason is not None, name
        assert events[-1].error is None, events[-1].error
        logits = self._recorder.logits.pop(name, {})
        scores = join_scores([event.scores for event in events if event.scores is not None])
        parts = () if scores is None else (scores.output, scores.prompt)
        return Answer(
            tuple(token for event in events for token in event.token_ids),
            tuple(logits[index] for index in sorted(logits)),
            tuple(part.values + part.ids for part in parts if part is not None),
            events[-1].pooled or b"",
        )

    def alone(self, name: str, question: Question) -> Answer:
        """With no other one in the engine; no name may come twice."""
        self.add(name, question)
        self.engine.run()
        return self.take(name)

    def among_neighbours(
        self,
        questions: Sequence[Question],
        rng: random.Random,
        check: Callable[[Question, Answer], None],
        *,
        most: int = 8,
    ) -> None:
        """Ask these questions in their order, each beside up to `most`-1 others that come and go."""
        open_questions: dict[str, Question] = {}
        asked = 0
        while asked < len(questions) or open_questions:
            while asked < len(questions) and len(open_questions) < most and rng.random() < 0.5:
                name = f"q{asked}"
                open_questions[name] = questions[asked]
                self.add(name, questions[asked])
                asked += 1
            for event in self.engine.step():
                if event.finish_reason is not None:
                    check(open_questions.pop(event.request_id), self.take(event.request_id))

    def close(self) -> None:
        self.engine.close()
