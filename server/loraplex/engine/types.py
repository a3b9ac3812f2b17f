"""The values that travel between the engine, its clients and its runner.

All are frozen dataclasses that msgspec can encode, or frozen structs of it where one is made for every token, except
`Sequence`, the engine's own mutable record of one request. Results of steps are in `execution.step_results`. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

import msgspec

from loraplex.adapters.numerics.outputs import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.logprobs import Scores
from loraplex.engine.pooling import PooledPrompt, Pooling

FinishReason = Literal["stop", "length", "abort", "error"]
AdapterState = Literal["hot", "warm", "cold"]
MEASURE_STEPS = 8
"""Parts in which the sites of an adapter are measured, each in a step of its own."""
MEASURE_PRIORITY = 1001  # above what any client can ask for
Namespace = tuple[str, str | None]
"""Tenant and adapter digest (None: the base model): requests of one namespace may share KV."""
BlockKey = tuple[Namespace, bytes]
"""The name of a full KV block's content: its namespace and its link of the hash chain (see `prefix`)."""
ErrorCode = Literal[
    "server_overloaded",  # a bounded queue is full
    "adapter_unavailable",  # the adapter could not be loaded, or cannot fit
    "adapter_not_finite",  # what the adapter makes of this prompt is infinite, or no number
    "grammar_failed",  # the grammar cannot be built, or needs more than its limits allow
    "engine_restarting",  # the engine process died or is being replaced
    "deadline_exceeded",
    "context_length_exceeded",  # can never fit max_model_len or the KV pool
    "internal_error",
    "draining",
]


def _option(neutral: Any, *, tried: Any) -> Any:
    """An option that a kernel computes; `tried` is the value with which the warm-up tries it."""
    return field(default=neutral, metadata={"tried": tried})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and both penalties 0 are neutral. `seed` is
    always set by the time a request reaches the engine; noise is a function of (seed, choice, output position) alone,
    so preemption and batch-mates cannot change it. `stop_token_ids` end the sequence and are part of its count, not of
    its text. `eos` ids come from the model and are dropped under `ignore_eos`. Neither may be sampled before
    `min_tokens` outputs. `max_tokens` 0 computes the prompt and samples nothing. `logprobs` asks for the log
    probability of every output token, and for that number of the most likely ones at its place (0 … 20);
    `prompt_logprobs` does so for every prompt token but the first, and with `prompt_ranks` its rank.
    `logprob_token_ids` asks for those of these tokens too, 128 at most, which come behind the most likely ones: for
    this `logprobs` must not be None. All are of the model's own logits, before any option here acts on them.
    """

    max_tokens: int
    temperature: float = _option(1.0, tried=0.7)
    top_p: float = _option(1.0, tried=0.9)
    top_k: int = _option(0, tried=5)
    min_p: float = _option(0.0, tried=0.01)
    repetition_penalty: float = _option(1.0, tried=1.1)
    presence_penalty: float = _option(0.0, tried=0.1)
    frequency_penalty: float = _option(0.0, tried=0.1)
    seed: int = 0
    choice: int = 0
    logit_bias: tuple[tuple[int, float], ...] = _option((), tried=((0, 1.0),))
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = _option(None, tried=2)
    prompt_logprobs: int | None = _option(None, tried=2)
    prompt_ranks: bool = _option(False, tried=True)
    logprob_token_ids: tuple[int, ...] = _option((), tried=(0,))
    scored_from: int = 0
    """`prompt_logprobs` begin with the token behind this position. Blocks before it may come from the prefix cache."""

    @classmethod
    def every_option(cls, max_tokens: int) -> SamplingParams:
        """All options that a kernel computes, each with a value that is not neutral."""
        tried = {each.name: each.metadata["tried"] for each in fields(cls) if "tried" in each.metadata}
        return cls(max_tokens, **tried)

    @property
    def has_penalty(self) -> bool:
        """Whether any token that occurred counts for the next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. `request_id` is the internal, unique id. `deadline` is in seconds from its arrival in
    the engine, by the engine's clock (None: no deadline); `max_load`, what it waits of that for an adapter that is not
    on the device (None: as long as it takes; 0: not at all). `priority` (higher first) orders within the tenant only.
    `adapter` None is the base model. `grammar` is the text of an llguidance grammar (what its LLMatcher takes) that the
    answer must match; where it ends, the answer ends with finish_reason "stop"."""

    request_id: str
    tenant_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    priority: int = 0
    deadline: float | None = None
    max_load: float | None = None
    grammar: str | None = None
    pooling: Pooling | None = None
    """The hidden states of the prompt are wanted, pooled so. Nothing is sampled then: `max_tokens` is 0."""
    generated: tuple[int, ...] = ()
    """Output tokens that another engine has delivered already, `max_tokens` of them at most. The answer goes on behind
    them as after a preemption: at output index len(generated), and all limits and options count them. What was told
    of them, and of the prompt before them, is not told again. It waits for its adapter however long that takes, and is
    not refused in a full queue."""
    adapter_from: int = 0
    """The first position at which the adapter acts (of an activated LoRA, where its invocation begins in the prompt).
    The positions before are computed as the base model's, and share their KV with it."""
    background: bool = False
    """Whether the request runs in what others leave. It waits while any of them waits, and loses its KV blocks to them.
    It is none of its tenant's requests. Unless it is of a `batch`, it is charged to nobody, its KV is not found in the
    prefix cache, and it takes no grammar, no pooling, no `generated` and no `adapter_from`."""
    batch: bool = False
    """Whether this background request is a line of a batch. It takes all that other requests take, shares the
    background with other lines by their tenants' weights, and is scheduled as other requests are while none of these
    is here."""
    speculation: bool = True
    """Whether tokens of the answer may be drafted. That changes how long it takes, and nothing else."""

    @property
    def is_shadow(self) -> bool:
        return self.background and not self.batch


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """A request for the outputs of an adapter's own sites for fixed inputs. They are computed in MEASURE_STEPS parts,
    at most one a step, beside the sequences of the step. `deadline` as in EngineRequest."""

    request_id: str
    adapter: AdapterRef
    deadline: float | None = None

    def queued(self) -> EngineRequest:
        """The request as the queue knows it: of the adapter's tenant, before all else that this tenant waits for. A
        tenant that always waits for something would never get its version otherwise. It has no tokens."""
        return EngineRequest(
            self.request_id,
            self.adapter.tenant_id,
            (),
            SamplingParams(max_tokens=0),
            self.adapter,
            priority=MEASURE_PRIORITY,
            deadline=self.deadline,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """`prompt_tokens` is 0 for a sequence that no engine ever scheduled. `completion_tokens` are all output tokens of
    the answer, those of `EngineRequest.generated` too. `cached_tokens` of the prompt were found in the prefix cache of
    the engine that ends it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineError:
    """`retry_after_s`: the time after which trying again makes sense, where that is known. `is_own`: the request
    itself led to it, or the queue is full, and as much of it is this tenant's as of any other."""

    code: ErrorCode
    message: str
    retry_after_s: float | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, from arrival in the engine: to the first step, to the first and the last token that this engine samples,
    and to the end. `num_preemptions`: how often it lost its blocks. `arrived`: by the engine's clock, CLOCK_MONOTONIC,
    which all processes of a machine share; None if it was not taken in. `adapter_s`: to its adapter; None: no wait."""

    queue_s: float
    first_token_s: float | None
    total_s: float
    last_token_s: float | None = None
    num_preemptions: int = 0
    arrived: float | None = None
    adapter_s: float | None = None


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Something that happened to one request. Exactly one event of a request has `finish_reason` set; it is
    the last. `adapter_state` (where the adapter was when the request arrived) is set on the first event of a
    request that names an adapter. `usage` and `timing` are set on the terminal event.
    `stop_token_id` is the stop or eos id that ended it, for finish_reason "stop".
    `duplicate` marks the refusal of a request whose id is in flight already: it speaks of the newcomer, and the
    request that has the id goes on. `scores` are the log probabilities of `token_ids`, and of the next tokens of the
    prompt in order from its second; of the whole prompt they come before the first output token, or with it.
    `pooled` is on the last event of a request with `pooling`, float32, little-endian: [C], not normalised; of
    "classify" logits [labels], of "token_classify" [prompt tokens, labels]. `measured` is on the last event of a
    MeasureRequest."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    adapter_state: AdapterState | None = None
    stop_token_id: int | None = None
    duplicate: bool = False
    scores: Scores | None = None
    pooled: bytes | None = None
    measured: SiteOutputs | None = None


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    `token_ids` holds the prompt and every output token that has been collected. `num_pending` counts output tokens that
    submitted steps will sample but that have not been collected yet (0 without lookahead). `num_computed` is how many
    positions have been *scheduled* for computation; it catches up with `num_tokens`, and is at most `most_computed`.
    `block_ids[i]` holds positions 16·i … 16·i+15, of models with several groups of layers as
    `loraplex.engine.kv.sequence_blocks` says. `epoch` grows at each preemption, so that a result of an older life
    can be told apart. `num_charged` is the highest position that was ever charged to the tenant, so that recomputation
    is free. Positions below `lost_until` were computed before a preemption. `block_keys[i]` names the content of the
    i-th full block. `num_scored` prompt positions have told the log probability of the token behind them, or
    lie before those that are to tell it.
    `tells_outputs`: a step that samples is told the tokens of its answer. `num_starved` times in a row the step that
    was to compute position `starved_at`, and nothing else, did not fit into the device's memory.

    A request with `generated` begins as after a preemption: these are outputs, another engine has computed them and all
    that is before them, and has charged and scored the prompt.

    The sequence of a MeasureRequest has no tokens and no blocks. `measured` are its outputs by part, and `num_computed`
    counts the parts that were scheduled; None for all other sequences.
    """

    request: EngineRequest
    arrival: float
    order: int
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0
    block_ids: tuple[int, ...] = ()
    num_given_back: int = 0  # entries of block_ids that stand for blocks which no row sees any more
    blocks_done: int = 0  # full blocks computed and collected, by which blocks are given back
    epoch: int = 0
    slot: int = -1  # the adapter's device slot while running; -1 on the base
    window_slot: int = -1  # of a model with layers that keep a state, while running: the place of its window
    states: tuple[tuple[int, int], ...] = ()  # (n, state behind 16·n positions) that it holds, in order
    kept_ends: tuple[int, ...] = ()  # each n whose state others may find
    adapter_opened: float | None = None  # when its adapter became schedulable, as of its first step
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    deadline_at: float | None = None  # by the engine's clock
    adapter_state: AdapterState | None = None  # at arrival
    num_charged: int = 0
    aside: bool = False  # among the background sequences
    lost_until: int = 0
    num_scored: int = 0
    starved_at: int = -1
    num_starved: int = 0
    block_keys: list[BlockKey] = field(default_factory=list)
    measured: dict[int, SiteOutputs] | None = None
    pooled: PooledPrompt | None = field(init=False)
    most_computed: int = field(init=False)
    tells_outputs: bool = field(init=False)

    def __post_init__(self) -> None:
        pooling = self.request.pooling
        self.pooled = None if pooling is None else PooledPrompt(pooling, self.num_prompt)
        # The last token is sampled, and never computed.
        self.most_computed = self.num_prompt + max(0, self.request.sampling.max_tokens - 1)
        self.tells_outputs = self.request.grammar is not None or self.request.sampling.has_penalty
        self.num_scored = self.request.sampling.scored_from
        if self.request.generated:
            self.num_charged = self.num_prompt
            self.lost_until = len(self.token_ids) - 1

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Collected output tokens, and those that another engine has delivered."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_given_back

    @property
    def is_resumed(self) -> bool:
        """Whether it was begun before: it was preempted, or another engine has delivered tokens of it."""
        return self.epoch > 0 or bool(self.request.generated)

    @property
    def num_to_score(self) -> int:
        """Prompt positions whose logits are wanted: all but the last, or none."""
        # They are told before the first output token, or with it.
        is_wanted = self.request.sampling.prompt_logprobs is not None and not self.request.generated
        return self.num_prompt - 1 if is_wanted else 0

    @property
    def num_tokens(self) -> int:
        """Positions that exist, the pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def all_sampled(self) -> bool:
        """Its last token is sampled already, or is being sampled by a step in flight."""
        # Asked of every running sequence in every step.
        num_drawn = len(self.token_ids) - len(self.request.prompt_ids) + self.num_pending
        return 0 < self.request.sampling.max_tokens <= num_drawn


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A slice of one sequence in one step: positions start … start+num_tokens-1 are computed. It is plain data: what
    execution needs, and nothing that changes. `order` is the sequence's, by which the core finds it again. `samples`
    says that the last of them is the sequence's last known position, so that a token is sampled from it; that token
    will be output number `output_index` (0-based). If `pending_input` is set, the token at position `start` is the one
    that the previous submitted step samples for this sequence and is not on the host yet (then num_tokens is 1).
    `block_ids` and `slot` are those at planning, so that a later change to the sequence cannot reach a step that is
    already submitted; the slot is -1 where no adapter acts. `token_ids` are the input tokens of the slice (the
    placeholder 0 where pending). `targets` are the prompt tokens whose log probabilities are wanted: the first is the
    one behind position `score_start`, which lies in the slice. With `pool_start` the sequence is pooled: the hidden
    states from this position on are wanted; none where it is the slice's end. `outputs` are the collected tokens of the
    answer, of a slice that samples and has a grammar or a penalty; else empty. `drafted` are guesses at the tokens that
    follow: the slice's last positions and `token_ids` are theirs, and a token is sampled before and behind each of
    them, all as if those before were right. Nobody changes it, though it is not frozen: one is made for every sequence
    of every step, and a frozen one takes three times as long to make."""

    request: EngineRequest
    order: int
    epoch: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    slot: int
    samples: bool
    pending_input: bool
    output_index: int
    score_start: int = 0
    targets: tuple[int, ...] = ()
    pool_start: int | None = None
    outputs: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    window_slot: int = -1
    """The place of the sequence's window, as of planning too; -1: no layer keeps a state."""
    state: int = -1
    """That of the last multiple of 16 up to `start`."""
    state_targets: tuple[int, ...] = ()
    """The states that the ends of windows in the slice write."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """A part of a MeasureRequest in one step: number `start` of MEASURE_STEPS, of the adapter in `slot`. `order` and
    `epoch` are the sequence's at planning. It takes no row of the forward pass and no KV block."""

    request: EngineRequest
    order: int
    epoch: int
    start: int
    slot: int

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes of the step's budget."""
        return 1


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block between the KV pool and a slot of host memory (`loraplex.engine.kv.host_tier`), or a `part`, as large, of
    the state `block`. `key`: of one that goes on to the disk (`disk_tier` there) or, with -1 for block or slot, to
    another engine (`handed_blocks`). With a `payload`, which comes from either, the slot is -1."""

    block: int
    slot: int
    to_host: bool
    key: BlockKey | None = None
    payload: bytes | None = None
    part: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `step_id` grows by one a plan. `preempted` are the sequences that lost their blocks while
    this plan was made. `loads` are the digests whose way to the device was begun. `measure` is computed behind the
    forward pass over `scheduled`, which may be empty then. `copies` are done before it, in their order, also where the
    step itself cannot be computed. A step may have nothing but copies."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    measure: MeasuredPart | None = None
    copies: tuple[BlockCopy, ...] = ()

    @property
    def is_of_slices(self) -> bool:
        """Whether its slices alone take its time: it measures nothing, and brings no block from behind the pool."""
        return self.measure is None and all(one.to_host for one in self.copies)

    @property
    def parts(self) -> tuple[ScheduledSequence | MeasuredPart, ...]:
        """All that the step computes."""
        return self.scheduled if self.measure is None else (*self.scheduled, self.measure)

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)
