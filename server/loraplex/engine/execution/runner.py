"""Steps on a real model: plans in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from loraplex.engine.execution.batch import FlatStep, flatten
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import LoraSource, PlainInputs, StepAdapters, StepInputs, begin_adapters
from loraplex.engine.execution.pooling import Pooled, PooledSlice, pool, pooled_parts
from loraplex.engine.execution.site_probe import Measured, SiteProbe, measure_part, site_outputs
from loraplex.engine.execution.step_masks import StepMasks, begin_masks
from loraplex.engine.execution.torch_errors import as_device_fault, give_back_memory
from loraplex.engine.grammar.masks import MaskMaker, MaskRow
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.logprobs import Scores, cut_scores
from loraplex.engine.model.base import ForwardBatch, Model
from loraplex.engine.pooling import PooledPart
from loraplex.engine.sampling.acceptance import accepted_tokens, add_output_scores
from loraplex.engine.sampling.batch import AskedScores, SamplingBatch
from loraplex.engine.sampling.sampled_row import sampled_rows
from loraplex.engine.sampling.sampler import Sampler, TorchSampler
from loraplex.engine.sampling.scoring import TokenScores, prompt_scores
from loraplex.engine.types import MeasuredPart, StepPlan, StepResult


class InputSource(Protocol):
    """Where a step's inputs begin."""

    def begin_inputs(self, plan: StepPlan) -> StepInputs:
        """Begin a step's inputs, on the planning thread, once a step."""
        ...


class _Plain:
    """An InputSource that prepares nothing."""

    def __init__(self, model: Model, lora: LoraSource | None) -> None:
        self._arguments = (model.device, model.attention, lora)

    def begin_inputs(self, plan: StepPlan) -> StepInputs:
        return PlainInputs(*self._arguments)


@dataclass(slots=True)
class _SampledTokens:
    """The tokens that a step sampled, on the device, for the step after it: tokens [S] int64 (0 for a row that failed),
    and the sampled row of each request. `tokens` is None until the step has run, and for good if it failed; only the
    worker writes and reads it. `future` is the step's."""

    row_of: dict[str, int]
    tokens: torch.Tensor | None = None
    future: Future[_OnHost] | None = None

    def wait(self) -> list[int | None] | None:
        """[S] on the host, None for a row that failed; None if the step did."""
        if self.future is None:
            return None
        try:
            answer = self.future.result()
            if answer.arrived is not None:
                answer.arrived.synchronize()
        except Exception:
            return None  # `collect` reports it
        pairs = zip(answer.tokens.tolist(), answer.ok.tolist(), strict=True)
        return [token if ok else None for token, ok in pairs]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Rows [P] int64 of a step whose input the step before it samples, and the sampled rows [P] int64 of that one."""

    rows: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class _OnHost:
    """Tokens [S] int64, flags [S] bool, flags [W] bool of the watched rows, and the log probabilities that were asked
    for, of sampled and of prompt tokens, on their way to the host; `arrived` is None on a CPU. `no_mask`: what is wrong
    with the grammars of sampled rows."""

    tokens: torch.Tensor
    ok: torch.Tensor
    watched_ok: torch.Tensor | None
    output: TokenScores | None
    prompt: TokenScores | None
    pooled: Pooled | None
    arrived: torch.cuda.Event | None
    no_mask: dict[int, str]
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A submitted step."""

    step_id: int
    num_scheduled: int
    sampled: tuple[int, ...]
    asked: AskedScores | None
    prompt_slices: tuple[tuple[int, int, int], ...]
    prompt_ranked: frozenset[int]
    watched: tuple[int, ...]
    masked: tuple[MaskRow, ...]
    pooled: tuple[PooledSlice, ...]
    drafted: dict[int, tuple[int, ...]]
    failed: dict[int, str] = field(repr=False)
    future: Future[_OnHost] = field(repr=False)


class ModelRunner:
    """Computes steps in the order of their submission, on the executor's one worker.

    `submit` and `collect` belong to one thread. A row whose input token the previous submitted step draws takes it from
    the device, without a turn through the host.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        executor: Executor,
        *,
        eos_ids: frozenset[int],
        lora: LoraSource | None = None,
        inputs: InputSource | None = None,
        sampler: Sampler | None = None,
        masks: MaskMaker | None = None,
        probe: SiteProbe | None = None,
    ) -> None:
        """`inputs` is where a model's steps begin that takes other inputs than plain tensors; it knows the adapters
        itself. `sampler`: torch's unless another one is given. `masks`: for rows with a grammar. `probe`: for the
        parts of a MeasureRequest."""
        self._model = model
        self._kv = kv
        self._executor = executor
        self._eos_ids = eos_ids
        self._inputs = inputs or _Plain(model, lora)
        self._sampler: Sampler = sampler or TorchSampler(model.shape.vocab_size)
        self._masks = masks
        self._probe = probe
        self._previous = _SampledTokens({})

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step. Raises if the plan is not one that this model can run, or an adapter in it is not there, and
        DeviceOutOfMemory and DeviceLost as `collect` does; then nothing of it is computed."""
        try:
            return self._submit(plan)
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        raise fault

    def _submit(self, plan: StepPlan) -> StepHandle:
        if not plan.scheduled:
            return self._submit_measured(plan)
        vocab_size = self._model.shape.vocab_size
        inputs = self._inputs.begin_inputs(plan)
        step = flatten(plan, vocab_size=vocab_size, inputs=inputs)
        self._kv.expect(step.fresh_blocks)
        rows = sampled_rows(plan.scheduled[index] for index in dict.fromkeys(step.sampled))
        sampling = self._sampler.plan(rows, eos_ids=self._eos_ids, upload=inputs)
        adapters = begin_adapters(
            inputs, step.segments, step.num_rows, step.logits_segments, len(step.logits_rows)
        )
        previous = self._previous
        own_tokens = _SampledTokens({row.request_id: s for s, row in enumerate(rows)})
        pending = _pending(step, previous, inputs)
        masks = begin_masks(self._masks, rows, self._eos_ids, previous.row_of, previous.wait, inputs)
        work = partial(
            self._compute,
            inputs,
            step,
            sampling,
            adapters,
            pending,
            previous,
            own_tokens,
            masks,
            plan.measure,
        )
        future = own_tokens.future = self._executor.submit(lambda: self._run(work))
        self._previous = own_tokens
        return StepHandle(
            plan.step_id,
            len(plan.scheduled),
            step.sampled,
            sampling.scores,
            () if step.prompt_rows is None else step.prompt_rows.slices,
            frozenset() if step.prompt_rows is None else step.prompt_rows.ranked,
            () if step.watched is None else step.watched.slices,
            () if masks is None else masks.rows,
            () if step.pooled is None else step.pooled.slices,
            {index: part.drafted for index, part in enumerate(plan.scheduled) if part.drafted},
            step.failed,
            future,
        )

    def _submit_measured(self, plan: StepPlan) -> StepHandle:
        """A step without a forward pass."""
        self._previous = _SampledTokens({})
        work = partial(self._measure_alone, plan.measure)
        future = self._executor.submit(lambda: self._run(work))
        return StepHandle(plan.step_id, 0, (), None, (), frozenset(), (), (), (), {}, {}, future)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step that `submit` gave this handle for. Raises DeviceOutOfMemory if it did not fit, DeviceLost if
        the device will compute nothing any more, else what its forward pass raised; later steps are computed all the
        same."""
        assert isinstance(handle, StepHandle)
        answer, failed = self._wait(handle.future), dict(handle.failed)
        scores: dict[int, Scores] = {}
        if answer.prompt is not None:
            scores = prompt_scores(answer.prompt, handle.prompt_slices, handle.prompt_ranked, failed)
        token_ids = accepted_tokens(
            [()] * handle.num_scheduled,
            handle.sampled,
            handle.drafted,
            zip(answer.tokens.tolist(), answer.ok.tolist(), strict=True),
            failed,
        )
        num_accepted = {index: max(0, len(token_ids[index]) - 1) for index in handle.drafted}
        if answer.watched_ok is not None:
            for index, ok in zip(handle.watched, answer.watched_ok.tolist(), strict=True):
                if not ok:
                    failed.setdefault(index, "what was computed of its prompt is not finite")
        if answer.output is not None and handle.asked is not None:
            add_output_scores(scores, handle.asked, answer.output, handle.sampled, token_ids)
        pooled: dict[int, PooledPart] = {}
        if answer.pooled is not None:
            for index, part in pooled_parts(handle.pooled, answer.pooled):
                if part is None:
                    failed.setdefault(index, "what was computed of its prompt is not finite")
                elif index not in failed:
                    pooled[index] = part
        # What was wrong with a row's input was known before.
        not_finite = frozenset(failed.keys() - handle.failed.keys())
        measured = site_outputs(answer.measured)
        result = StepResult(
            handle.step_id,
            tuple(token_ids),
            failed,
            scores,
            not_finite,
            pooled=pooled,
            measured=measured,
            num_accepted=num_accepted,
        )
        return self._follow_grammars(handle, answer.no_mask, result) if handle.masked else result

    def _follow_grammars(self, handle: StepHandle, no_mask: dict[int, str], result: StepResult) -> StepResult:
        assert self._masks is not None
        ended: set[int] = set()
        broken: dict[int, str] = {}
        token_ids = list(result.token_ids)
        going_on: dict[int, MaskRow] = {}
        for row in handle.masked:
            index = handle.sampled[row.row]
            sampled, offset = result.token_ids[index], row.sampled.offset
            if index in ended or index in broken or offset >= len(sampled):
                continue  # of a draft that was not accepted so far, or of a row that failed
            if row.row in no_mask:
                broken[index] = no_mask[row.row]
                continue
            accepted = self._masks.accept(row, sampled[offset], is_last=offset == len(sampled) - 1)
            token_ids[index] = (*sampled[:offset], *accepted.tokens)
            if accepted.error is not None:
                broken[index] = accepted.error
            elif accepted.ends:
                ended.add(index)
            else:
                going_on[index] = row
        self._masks.begin_next([row for index, row in going_on.items() if index not in ended | broken.keys()])
        scores = result.scores | {
            index: cut
            for index in ended & result.scores.keys()
            if (cut := cut_scores(result.scores[index], 0, len(token_ids[index]))) is not None
        }
        return replace(
            result, token_ids=tuple(token_ids), scores=scores, ended=frozenset(ended), grammar_failed=broken
        )

    def _wait(self, future: Future[_OnHost]) -> _OnHost:
        try:
            answer = future.result()
            if answer.arrived is not None:
                answer.arrived.synchronize()
            return answer
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        raise fault

    def close(self) -> None:
        """Finish what was submitted, and end the worker."""
        self._executor.close()
        if self._masks is not None:
            self._masks.close()

    # The worker.

    def _run(self, work: Callable[[], _OnHost]) -> _OnHost:
        try:
            return work()
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        # Only now nothing holds the step's activations any more.
        give_back_memory(self._model.device)
        raise fault

    @torch.inference_mode()
    def _compute(
        self,
        inputs: StepInputs,
        step: FlatStep,
        sampling: SamplingBatch,
        adapters: StepAdapters,
        pending: _Pending | None,
        previous: _SampledTokens,
        own_tokens: _SampledTokens,
        masks: StepMasks | None,
        measure: MeasuredPart | None,
    ) -> _OnHost:
        inputs.send()
        token_ids = step.token_ids
        if pending is not None and previous.tokens is not None:
            # In place: a recorded step reads its tokens there.
            token_ids.index_copy_(0, pending.rows, previous.tokens.index_select(0, pending.sources))
        hidden: list[torch.Tensor] = []
        logits = inputs.replay(adapters.any_lora)
        if logits is not None:
            logits = logits[: step.logits_rows.shape[0]]
        else:
            logits = self._model.forward(
                ForwardBatch(
                    token_ids=token_ids,
                    positions=step.positions,
                    attention=step.attention,
                    fresh_blocks=step.fresh_blocks,
                    logits_rows=step.logits_rows,
                    kv=self._kv,
                    lora=adapters.layers,
                    head_lora=adapters.head,
                    token_rows=adapters.by_token,
                    hidden_rows=None if step.pooled is None else step.pooled.rows,
                    take_hidden=None if step.pooled is None else hidden.append,
                )
            )
        pooled = None if step.pooled is None else pool(hidden.pop(), step.pooled)
        output = prompt = watched_ok = None
        if step.watched is not None:
            watched_ok = _finite(logits.index_select(0, step.watched.rows))
        if (asked_prompt := step.prompt_rows) is not None:
            prompt_logits = logits.index_select(0, asked_prompt.rows)
            prompt = self._sampler.score(
                prompt_logits, asked_prompt.targets, asked_prompt.num_top, ranked=bool(asked_prompt.ranked)
            )
        if step.sampled_logits is not None:
            logits = logits.index_select(0, step.sampled_logits)
        # The sampler overwrites them.
        kept = None if sampling.scores is None else logits.index_select(0, sampling.scores.rows)
        token_masks, no_mask = (None, {}) if masks is None else masks.wait()
        last_tokens = token_ids.index_select(0, step.sampled_rows)
        tokens, ok = self._sampler.sample(logits, sampling, last_tokens, token_masks)
        own_tokens.tokens = tokens
        if kept is not None and sampling.scores is not None:
            chosen = tokens.index_select(0, sampling.scores.rows)
            output = self._sampler.score(
                kept, chosen, max(sampling.scores.num_top), listed=sampling.scores.listed
            )
        measured = measure_part(self._probe, measure)
        return _to_host(tokens, ok, watched_ok, output, prompt, pooled, no_mask, measured)

    @torch.inference_mode()
    def _measure_alone(self, part: MeasuredPart | None) -> _OnHost:
        tokens = torch.empty(0, dtype=torch.int64, device=self._model.device)
        measured = measure_part(self._probe, part)
        return _to_host(tokens, tokens.bool(), None, None, None, None, {}, measured)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """[W, V] → [W] bool: whether all of a row is."""
    least, most = torch.aminmax(logits, dim=-1)
    return least.isfinite() & most.isfinite()


def _pending(step: FlatStep, previous: _SampledTokens, upload: HostToDevice) -> _Pending | None:
    """A request that the previous step sampled nothing for has failed there, and its row is not used: it keeps the
    harmless 0."""
    found = [(row, previous.row_of[name]) for row, name in step.pending if name in previous.row_of]
    if not found:
        return None
    rows, sources = zip(*found, strict=True)
    return _Pending(upload.ints(rows), upload.ints(sources))


def _to_host(
    tokens: torch.Tensor,
    ok: torch.Tensor,
    watched_ok: torch.Tensor | None,
    output: TokenScores | None,
    prompt: TokenScores | None,
    pooled: Pooled | None,
    no_mask: dict[int, str],
    measured: Measured | None,
) -> _OnHost:
    if tokens.device.type == "cpu":
        return _OnHost(tokens, ok, watched_ok, output, prompt, pooled, None, no_mask, measured)
    watched_ok = None if watched_ok is None else _pinned(watched_ok)
    if pooled is not None:
        sums, last = (None if part is None else _pinned(part) for part in (pooled.sums, pooled.last))
        pooled = Pooled(sums, last, _pinned(pooled.ok))
    on_host = (_on_host(output), _on_host(prompt))
    measured = None if measured is None else measured.to_host(_pinned)
    answer = _OnHost(_pinned(tokens), _pinned(ok), watched_ok, *on_host, pooled, None, no_mask, measured)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return replace(answer, arrived=arrived)


def _on_host(scores: TokenScores | None) -> TokenScores | None:
    if scores is None:
        return None
    listed = None if scores.listed is None else _pinned(scores.listed)
    ranks = None if scores.ranks is None else _pinned(scores.ranks)
    return TokenScores(_pinned(scores.values), _pinned(scores.ids), listed, ranks)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """On its way: what it holds may be read once the device has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
