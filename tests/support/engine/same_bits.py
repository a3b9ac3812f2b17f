"""Questions asked of an engine among random neighbours, and the bits of what was computed for each."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from loraplex.engine import build, device_parts
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.layer_kinds import ShortConvKind
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.scheduling.drafting import MAX_DRAFT, Draft, Drafter, DraftSource
from loraplex.engine.scheduling.timing.step_costs import MOST_ROWS, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes
from loraplex.engine.types import ScheduledSequence
from loraplex.engine.types import Sequence as EngineSequence
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import SCALE_BYTES, head_dim_of
from loraplex.kernels.attention.numba_attention import key_value_offsets, scale_offsets
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import VOCAB
from support.models.loading import plan_model


@dataclass(frozen=True, eq=False)
class Question:
    """`adapter` by its name, None for the base model. `pooled`: its embedding is asked for, not an answer."""

    prompt: tuple[int, ...]
    adapter: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False


@dataclass(frozen=True)
class Answer:
    """`logits`: of each output token, the bytes of what it was drawn from, float32. `kv`: of each output token but the
    last, a hash of its keys and values in all layers. `scores`: of its log probabilities. `embedding`: of its
    values."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]
    kv: tuple[bytes, ...]
    scores: tuple[bytes, ...]
    embedding: bytes


class Recorder:
    """Keeps the logits of every sampled row, as the sampler gets them, and the keys and values of every output token
    that was computed, as they lie in the cache then. By output index: where a drafted token was rejected, what comes of
    the right one takes its place."""

    def __init__(self, convolving: Collection[int]) -> None:
        """`convolving`: layers that are short convolutions."""
        self._convolving = convolving
        self._rows: dict[int, tuple[Any, list[SampledRow]]] = {}
        self._caches: list[Any] = []
        self.logits: dict[str, dict[int, bytes]] = {}
        self.kv: dict[str, dict[int, bytes]] = {}

    @contextmanager
    def patched(self) -> Iterator[None]:
        make_sampler, make_cache = device_parts.make_sampler, device_parts.WatchedKVCache

        def cache(*args: Any, **kwargs: Any) -> Any:
            self._caches.append(make_cache(*args, **kwargs))
            return self._caches[-1]

        with (
            mock.patch.object(
                device_parts,
                "make_sampler",
                lambda *args, **kwargs: self._wrap(make_sampler(*args, **kwargs)),
            ),
            mock.patch.object(device_parts, "WatchedKVCache", cache),
        ):
            yield

    def _wrap(self, sampler: Any) -> Any:
        plan, sample = sampler.plan, sampler.sample

        def planned(rows: Sequence[SampledRow], **options: Any) -> Any:
            batch = plan(rows, **options)
            # The batch is kept as well, so that no other one gets its id.
            self._rows[id(batch)] = batch, list(rows)
            return batch

        def sampled(logits: torch.Tensor, batch: Any, *rest: Any) -> Any:
            _, rows = self._rows.pop(id(batch))
            for row, values in zip(rows, logits, strict=True):
                self.logits.setdefault(row.request_id, {})[row.output_index] = values.numpy().tobytes()
                if row.offset == 0:
                    self._keep_kv(row.scheduled)
            return sample(logits, batch, *rest)

        sampler.plan, sampler.sample = planned, sampled
        return sampler

    def _keep_kv(self, part: ScheduledSequence) -> None:
        kept, kv = self.kv.setdefault(part.request_id, {}), self._caches[-1]
        for position in range(max(part.start, part.num_prompt), part.start + part.num_tokens):
            number, place = position // BLOCK_SIZE * kv.num_groups, position % BLOCK_SIZE
            digest = hashlib.sha256()
            for layer, group in enumerate(kv.group_of):
                if not kv.layer(layer).numel():
                    continue  # a delta net's: logits show its state
                block = kv.layer(layer)[part.block_ids[number + group]]
                own = (
                    block[place].view(torch.uint8)
                    if layer in self._convolving
                    else _of_position(block, place)
                )
                digest.update(own.numpy().tobytes())
            kept[position - part.num_prompt] = digest.digest()


def _of_position(block: torch.Tensor, place: int) -> torch.Tensor:
    """The bytes of the keys and values of one position of a layer's block, in numba's order."""
    heads, dim = block.shape[-2], head_dim_of(block[None])
    offsets = key_value_offsets(np.arange(heads)[:, None], place, np.arange(dim), dim, block.element_size())
    if block.dtype is torch.int8:
        scales = scale_offsets(np.arange(heads)[:, None], place, dim)
        offsets = *offsets, *(each + np.arange(SCALE_BYTES) for each in scales)
    own = torch.from_numpy(np.concatenate([each.ravel() for each in offsets]))
    return block.flatten()[own].view(torch.uint8)


class PlantedDrafter(Drafter):
    """Drafts for two of three rows of the requests whose answers it was told, and always where a span of attention
    ends: half of its drafts are right, the others have one wrong token. `seen` counts tokens "drafted", "accepted" and
    "rejected", and drafts that end in another block than they begin ("across blocks") or behind another span of
    attention ("across spans")."""

    def __init__(self, rng: random.Random, vocab_size: int, *, span: int, block: int) -> None:
        super().__init__(bytes_per_tenant=1 << 16, total_bytes=1 << 16)
        self._rng = rng
        self._vocab_size = vocab_size
        self._sizes = {"across spans": span, "across blocks": block}
        self._answers: dict[str, tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()

    def plan(self, answers: Mapping[str, tuple[int, ...]]) -> None:
        """`answers`: by request id, of requests that come."""
        self._answers.update(answers)

    def propose(self, seq: EngineSequence, most: int) -> Draft | None:
        coming = self._answers.get(seq.request_id, ())[seq.num_outputs :]
        last = len(seq.token_ids) - 1
        is_at_edge = last // self._sizes["across spans"] != (last + most) // self._sizes["across spans"]
        count = min(len(coming), most, MAX_DRAFT if is_at_edge else self._rng.randrange(1, MAX_DRAFT + 1))
        if count < 1 or (self._rng.random() < 1 / 3 and not is_at_edge):
            return None
        tokens = list(coming[:count])
        if self._rng.random() < 0.5:
            place = self._rng.randrange(count)
            tokens[place] = (tokens[place] + self._rng.randrange(1, self._vocab_size)) % self._vocab_size
        for name, size in self._sizes.items():
            self.seen[name] += last // size != (last + count) // size
        return Draft(tuple(tokens), (0.99,) * count, "own")

    def verified(self, seq: EngineSequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        super().verified(seq, source, num_drafted, num_accepted)
        self.seen += Counter(drafted=num_drafted, accepted=num_accepted, rejected=num_drafted - num_accepted)


class Asked:
    """An engine that questions are asked of, in any number at once. `drafter` drafts for them, as if more rows cost
    next to nothing; without it nothing is drafted. Steps are bounded by a made-up time, so
    that prompts are cut into chunks of few positions and of other sizes than the step's."""

    def __init__(
        self,
        base: Path,
        work: Path,
        adapters: Mapping[str, Path],
        *,
        drafter: PlantedDrafter | None = None,
        **settings: Any,
    ) -> None:
        work.mkdir()
        self.adapters = tuple(adapters)
        spec = plan_model(base).spec
        kinds = () if spec is None else spec.layers
        self._recorder = Recorder(
            [n for n, kind in enumerate(kinds) if isinstance(kind.mixer, ShortConvKind)]
        )
        costs = StepCosts(tuple(1 + 0.01 * rows for rows in range(MOST_ROWS)))
        # Seconds that no step takes: all are corrected to their floor soon, whatever else runs on the machine.
        measured = MeasuredTimes({1: 1.0, 256: 400.0}, pair=0.002, sample=0.1, score=1.0, costs=costs)
        with (
            self._recorder.patched(),
            mock.patch.object(build, "Drafter", return_value=drafter),
            mock.patch.object(build, "measure_step_times", return_value=measured),
        ):
            settings = {
                "speculation": "off" if drafter is None else "auto",
                "max_step_ms": 60_000,
                **settings,
            }
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
        tokens = tuple(token for event in events for token in event.token_ids)
        logits, kv = self._recorder.logits.pop(name, {}), self._recorder.kv.pop(name, {})
        scores = join_scores([event.scores for event in events if event.scores is not None])
        parts = () if scores is None else (scores.output, scores.prompt)
        return Answer(
            tokens,
            tuple(logits[index] for index in range(len(tokens))),
            tuple(kv[index] for index in range(len(tokens) - 1)),
            tuple(part.values + part.ids for part in parts if part is not None),
            events[-1].pooled or b"",
        )

    def alone(self, name: str, question: Question) -> Answer:
        """With no other one in the engine; no name may come twice."""
        self.add(name, question)
        self.engine.run()
        return self.take(name)

    def each_alone(self, questions: Sequence[Question]) -> dict[Question, Answer]:
        """Their answers, one after the other."""
        return {one: self.alone(f"alone{number}", one) for number, one in enumerate(questions)}

    def together(self, questions: Sequence[Question], check: Callable[[Question, Answer], None]) -> None:
        """Ask these questions at one moment, under the names q0, q1 and so on."""
        for number, question in enumerate(questions):
            self.add(f"q{number}", question)
        self.engine.run()
        for number, question in enumerate(questions):
            check(question, self.take(f"q{number}"))

    def among_neighbours(
        self,
        questions: Sequence[Question],
        rng: random.Random,
        check: Callable[[Question, Answer], None],
        *,
        most: int = 8,
        first: int = 0,
    ) -> None:
        """Ask these questions in their order, each beside up to `most`-1 others that come and go. `first`: the number
        in the first one's name."""
        open_questions: dict[str, Question] = {}
        asked = 0
        while asked < len(questions) or open_questions:
            while asked < len(questions) and len(open_questions) < most and rng.random() < 0.5:
                name = f"q{first + asked}"
                open_questions[name] = questions[asked]
                self.add(name, questions[asked])
                asked += 1
            for event in self.engine.step():
                if event.finish_reason is not None:
                    check(open_questions.pop(event.request_id), self.take(event.request_id))

    def wrong_among_neighbours(
        self, expected: Mapping[Question, Answer], rng: random.Random, count: int
    ) -> list[Question]:
        """Ask `count` of these questions, drawn at random, among neighbours: those with other answers."""
        wrong: list[Question] = []

        def check(question: Question, answer: Answer) -> None:
            wrong.extend([question] * (answer != expected[question]))

        self.among_neighbours(rng.choices([*expected], k=count), rng, check)
        return wrong

    def close(self) -> None:
        self.engine.close()


def questions_of_owners(rng: random.Random, count: int) -> list[Question]:
    """`count` prompts for the base and the adapters `all` and `some`, some with the same tokens under other owners."""
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice((33, 70, 130, 200))))
        for adapter in (None, "all", "some")[: 1 + number % 3]:
            made.append(Question(prompt, adapter, {"max_tokens": rng.choice((1, 4, 20))}))
    return made
