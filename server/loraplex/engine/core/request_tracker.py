"""The events of requests: their tokens, their log probabilities, and exactly one end.

Every request that was taken in is here until it ends, and there is one way out, `end`: it takes the sequence from the
scheduler with all that it holds, and leaves the terminal event. Belongs to the step thread. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.numerics import SiteOutputs, join_outputs
from loraplex.engine.core.admission import MAX_TOKEN_ID
from loraplex.engine.execution.step_results import RowResult
from loraplex.engine.logprobs import Scores, cut_scores, wrong_scores
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import (
    MEASURE_STEPS,
    AdapterState,
    EngineError,
    EngineRequest,
    ErrorCode,
    FinishReason,
    MeasuredPart,
    ScheduledSequence,
    Sequence,
    SequenceState,
    Timing,
    TokenEvent,
    Usage,
)

_log = logging.getLogger(__name__)


class RequestTracker:
    """The requests that have not ended, `live` by id, and the events that were not taken yet.

    `eos_ids` end a sequence unless it ignores them; `clock` gives seconds; `on_end` gets the id of each request that
    was taken in, when it ends. `prompt_tokens` and `generation_tokens`
    count what was computed for requests since the start: a prompt when its first token is sampled, unless another
    engine did that.
    `num_adapter_waits` and `adapter_wait_s` count the ended sequences that waited for their adapter, and how long; not
    those of a MeasureRequest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: AdapterCache[Any],
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
        on_end: Callable[[str], None],
    ) -> None:
        self._on_end = on_end
        self._scheduler = scheduler
        self._cache = cache
        self._eos_ids = eos_ids
        self._clock = clock
        self._events: list[TokenEvent] = []
        self.live: dict[str, Sequence] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_adapter_waits = 0
        self.adapter_wait_s = 0.0

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[TokenEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def open(self, seq: Sequence) -> None:
        """A request was taken in: from now on it is owed an end."""
        if seq.request.adapter is not None:
            seq.adapter_state = self._cache.state(seq.request.adapter.digest)
        self.live[seq.request_id] = seq

    def refuse(self, request: EngineRequest, error: EngineError, *, duplicate: bool = False) -> None:
        """Refuse a request. `duplicate`: a live one has its id, and goes on."""
        self._events.append(
            TokenEvent(
                request.request_id,
                finish_reason="error",
                error=error,
                usage=Usage(len(request.prompt_ids), len(request.generated))
                if request.generated
                else Usage(0, 0),
                timing=Timing(0.0, None, 0.0),
                adapter_state=None if request.adapter is None else self._cache.state(request.adapter.digest),
                duplicate=duplicate,
            )
        )

    # What a step brings.

    def sequence(self, part: ScheduledSequence | MeasuredPart) -> Sequence | None:
        """The sequence of a part of a plan; None once it has ended, even where another has its request's id since."""
        seq = self.live.get(part.request_id)
        return seq if seq is not None and seq.order == part.order else None

    def take_row(
        self,
        seq: Sequence,
        scheduled: ScheduledSequence,
        row: RowResult,
        now: float,
    ) -> None:
        """The outcome of a sequence's slice."""
        token_ids, scores, failed = row.token_ids, row.scores, row.failed
        if failed is not None and failed.cause == "numbers" and scheduled.slot >= 0:
            self.blame_adapter(seq)
            return
        if failed is not None and failed.cause == "grammar":
            self.blame_grammar(seq, failed.reason)
            return
        if failed is not None and failed.cause == "adapter":
            self.error(seq, "adapter_unavailable", failed.reason, spoilt=True)
            return
        failure = None if failed is None else failed.reason
        if failure is None and bool(token_ids) != scheduled.samples:
            failure = f"{len(token_ids)} tokens came for a slice that draws {'some' if scheduled.samples else 'none'}"
        if failure is None and token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
            failure = "the step sampled a token that is not in any vocabulary"
        if failure is None:
            asked = seq.request.sampling.logprobs is not None
            failure = wrong_scores(scores, len(token_ids) if asked else 0, len(scheduled.targets))
        if failure is None and scheduled.pool_start is not None:
            wanted = scheduled.start + scheduled.num_tokens - scheduled.pool_start
            if row.pooled is None or row.pooled.num_positions != wanted:
                failure = f"not the {wanted} hidden states came that are pooled"
        if failure is not None:
            self._fail(seq, failure)
            return
        self._scheduler.computed(seq, scheduled)
        seq.num_scored += len(scheduled.targets)
        if seq.pooled is not None and row.pooled is not None:
            seq.pooled.add(row.pooled)
        if token_ids:
            # A longer answer to the step before may have brought the first of these already.
            known = seq.num_outputs - scheduled.output_index
            scores = cut_scores(scores, known, len(token_ids))
            drafts = (scheduled, row.num_accepted) if scheduled.drafted else None
            self._take_tokens(seq, token_ids[known:], scores, now, is_last=row.ended, drafts=drafts)
        elif (
            seq.request.sampling.max_tokens == 0 and scheduled.start + scheduled.num_tokens == seq.num_prompt
        ):
            self.prompt_tokens += seq.num_prompt
            vector = None if seq.pooled is None else seq.pooled.vector()
            self.end(seq, "length", scores=scores, pooled=vector)
        elif scores is not None:
            self._events.append(
                TokenEvent(seq.request_id, adapter_state=self._tell_state(seq), scores=scores)
            )

    def take_measured(self, seq: Sequence, part: MeasuredPart, outputs: SiteOutputs | None) -> None:
        """The outputs of a part of a MeasureRequest; None: they could not be computed."""
        assert seq.measured is not None
        if outputs is None:
            self._fail(seq, "the sites of its adapter could not be measured")
            return
        seq.measured[part.start] = outputs
        if len(seq.measured) == MEASURE_STEPS:
            outputs = join_outputs([seq.measured[number] for number in range(MEASURE_STEPS)])
            self.end(seq, "length", measured=outputs)

    def _fail(self, seq: Sequence, failure: str) -> None:
        _log.error("request %s failed in step: %s", seq.request_id, failure)
        self.error(seq, "internal_error", "computing this request failed", spoilt=True)

    def _take_tokens(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        scores: Scores | None,
        now: float,
        *,
        is_last: bool,
        drafts: tuple[ScheduledSequence, int] | None,
    ) -> None:
        """Append sampled tokens up to the one that ends the sequence, and report them. Tokens behind that one
        are dropped. Tokens of an epoch before a preemption are as good as any (see `Scheduler._preempt`). `drafts`: the
        slice with the drafts that led to them, and how many of these were right."""
        if not token_ids:
            return
        ending: tuple[FinishReason, int | None] | None = None
        count = 0
        for token_id in token_ids:
            seq.token_ids.append(token_id)
            count += 1
            ending = self._ending(seq, ends_grammar=is_last and count == len(token_ids))
            if ending is not None:
                break
        seq.num_pending = max(0, seq.num_pending - count)
        if seq.first_token is None:
            seq.first_token = now
            if not seq.request.generated:
                self.prompt_tokens += seq.num_prompt
        seq.last_token = now
        self.generation_tokens += count
        self._scheduler.delivered(seq, count)
        if drafts is not None:
            self._scheduler.verified(seq, *drafts)
        taken, scores = token_ids[:count], cut_scores(scores, 0, count)
        if ending is None:
            state = self._tell_state(seq)
            self._events.append(TokenEvent(seq.request_id, taken, adapter_state=state, scores=scores))
        else:
            reason, stop_token_id = ending
            self.end(seq, reason, taken, stop_token_id=stop_token_id, scores=scores)

    def _ending(self, seq: Sequence, *, ends_grammar: bool) -> tuple[FinishReason, int | None] | None:
        """Why a sequence ends with its newest token, and the stop or eos id that this is; None if it goes on."""
        sampling, token_id = seq.request.sampling, seq.token_ids[-1]
        is_eos = token_id in self._eos_ids
        stops = token_id in sampling.stop_token_ids or (is_eos and not sampling.ignore_eos)
        if ends_grammar or (stops and seq.num_outputs > sampling.min_tokens):
            # A grammar may end with a token that is text, and with an eos that was to be ignored.
            return "stop", token_id if stops or is_eos else None
        return ("length", None) if seq.num_outputs >= sampling.max_tokens else None

    def end_if_complete(self, seq: Sequence, *, ends_grammar: bool) -> bool:
        """End a request whose generated tokens are the whole answer already. Returns whether they are.
        `ends_grammar`: the last of them ends its grammar."""
        ending = self._ending(seq, ends_grammar=ends_grammar)
        if ending is None:
            return False
        reason, stop_token_id = ending
        self.end(seq, reason, stop_token_id=stop_token_id)
        return True

    def blame_adapter(self, seq: Sequence) -> None:
        """End a request whose numbers are not finite: the base gives finite ones for every prompt, so its adapter is at
        fault."""
        adapter = seq.request.adapter
        if seq.state is SequenceState.FINISHED or adapter is None:
            return
        message = (
            f"adapter {adapter.name}@v{adapter.version} gives numbers for this prompt that are infinite, or none, "
            "in the precision that the model is served in; its weights are too large"
        )
        _log.warning("request %s: %s", seq.request_id, message)
        self.error(seq, "adapter_not_finite", message, spoilt=True)

    def blame_grammar(self, seq: Sequence, reason: str) -> None:
        """The answer's grammar cannot be built or followed."""
        if seq.state is not SequenceState.FINISHED:
            self.error(seq, "grammar_failed", f"the grammar that the answer must match fails: {reason}")

    # Endings.

    def error(self, seq: Sequence, code: ErrorCode, message: str, *, spoilt: bool = False) -> None:
        self.end(seq, "error", error=EngineError(code, message), spoilt=spoilt)

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        *,
        error: EngineError | None = None,
        stop_token_id: int | None = None,
        scores: Scores | None = None,
        pooled: bytes | None = None,
        measured: SiteOutputs | None = None,
        spoilt: bool = False,
    ) -> None:
        """The one way out for every request that was taken in. `spoilt`: none of its KV is good for others."""
        del self.live[seq.request_id]
        self._on_end(seq.request_id)
        now = self._clock()
        adapter_s = self._adapter_s(seq, now)
        if adapter_s is not None and seq.measured is None:
            self.num_adapter_waits += 1
            self.adapter_wait_s += adapter_s
        if reason in ("stop", "length"):
            self._scheduler.answered(seq)
        self._scheduler.finish(seq, spoilt=spoilt)
        self._events.append(
            TokenEvent(
                seq.request_id,
                token_ids,
                finish_reason=reason,
                error=error,
                usage=Usage(seq.num_prompt if _has_begun(seq) else 0, seq.num_outputs, seq.num_cached),
                timing=Timing(
                    queue_s=(now if seq.first_scheduled is None else seq.first_scheduled) - seq.arrival,
                    first_token_s=None if seq.first_token is None else seq.first_token - seq.arrival,
                    total_s=now - seq.arrival,
                    last_token_s=None if seq.last_token is None else seq.last_token - seq.arrival,
                    num_preemptions=seq.epoch,
                    arrived=seq.arrival,
                    adapter_s=adapter_s,
                ),
                adapter_state=self._tell_state(seq),
                stop_token_id=stop_token_id,
                scores=scores,
                pooled=pooled,
                measured=measured,
            )
        )

    def _adapter_s(self, seq: Sequence, now: float) -> float | None:
        """How long a live sequence waited for its adapter before its first step; None if it did not."""
        if seq.first_scheduled is None:
            queue = self._scheduler.queue
            return now - seq.arrival if seq in queue and not queue.is_ready(seq) else None
        opened = seq.adapter_opened
        return opened - seq.arrival if opened is not None and opened > seq.arrival else None

    def _tell_state(self, seq: Sequence) -> AdapterState | None:
        state, seq.adapter_state = seq.adapter_state, None
        return state


def _has_begun(seq: Sequence) -> bool:
    """Whether anything of it was computed, here or elsewhere, or was found in the prefix cache for it."""
    return seq.first_scheduled is not None or seq.is_resumed or seq.num_cached > 0
