"""From a checked request to the sequences that the engine is to generate."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from loraplex.adapters.ref import AdapterRef
from loraplex.api.errors import invalid
from loraplex.api.generation.decision import FIELD, Decision
from loraplex.api.generation.tool_use import PLAIN, Reading
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.engine.types import EngineRequest
from loraplex.serving.text.processor import Spelling

SEED_MASK = (1 << 63) - 1
MAX_LOGPROBS = 1 << 19
"""In one answer, the most likely tokens' included: some 40 MB of JSON."""
TOKEN_IDS_A_LOGPROB = 8
"""Token ids that take the room of a log probability in an answer."""


@dataclass(frozen=True)
class GenerationPlan:
    """Prompts as tokens, each with the most tokens that its answers may have. `asked` is the answer's length
    that the client asks for (None: the default), which alone can be refused for never fitting a limit; `asked_field` is
    where it stands. `echoes` are the prompts as texts, where they are to be repeated at the head of each choice.
    `reading` says how each choice's text is read. `grammar`: what each choice must follow, checked. `end_ids` end an
    answer beside the model's own, as those do. `places`: the first position of each prompt at which the adapter acts,
    None where the base is to answer; empty: 0. `decision`: what is told of each prompt's choices."""

    request: ChatRequest | CompletionRequest
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    asked: int | None
    asked_field: str
    echoes: tuple[Spelling, ...] = ()
    reading: Reading = PLAIN
    grammar: str | None = None
    end_ids: tuple[int, ...] = ()
    places: tuple[int | None, ...] = ()
    decision: Decision | None = None

    @property
    def n(self) -> int:
        return self.request.n or 1

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_sequences(self) -> int:
        """Those that run at a time."""
        longer = 0 if self.decision is None else len(self.decision.longer) * len(self.prompts)
        return max(self.num_choices, longer)

    def sequences_field(self, source: str) -> str:
        """The field that asks for that number; `source` is the one that holds the prompt."""
        if self.num_sequences > self.num_choices:
            return FIELD
        return "n" if self.n > 1 else source

    @property
    def tokens_read(self) -> int:
        """Tokens of the prompts, and of the choices that are scored behind them."""
        scored = 0 if self.decision is None else self.decision.num_scored * len(self.prompts)
        return self.prompt_tokens + scored

    @property
    def named(self) -> tuple[int, ...]:
        """Tokens whose log probabilities are wanted at each place, each once."""
        firsts = () if self.decision is None else self.decision.firsts
        return tuple(dict.fromkeys((*(self.request.logprob_token_ids or ()), *firsts)))

    @property
    def num_told(self) -> int | None:
        """How many of the log probabilities at a place the answer tells, beside the token's own; None: all."""
        if self.decision is None:
            return None
        named = self.request.logprob_token_ids
        return self.request.wanted_logprobs if named is None else len(set(named))

    @property
    def max_logprobs(self) -> int:
        """The most log probabilities that the answer may hold, the most likely tokens' included; token ids count
        as `TOKEN_IDS_A_LOGPROB` of them do."""
        return sum(self.logprobs_by_field.values())

    @property
    def logprobs_by_field(self) -> dict[str, int]:
        """The same, by the field that asks for them."""
        fields, outputs = self.request, self.n * sum(self.max_tokens)
        chat = isinstance(fields, ChatRequest)
        prompts = self.prompt_tokens * (1 if chat else self.n)  # a chat's stands in the answer once
        found: dict[str, int] = {}
        if (wanted := fields.wanted_logprobs) is not None:
            of_prompts = self.n * self.prompt_tokens * (1 + wanted) if self.echoes else 0
            if fields.logprob_token_ids is not None:
                found["logprob_token_ids"] = outputs * (2 + len(fields.logprob_token_ids)) + of_prompts
            else:
                field = "top_logprobs" if chat and wanted else "logprobs"
                found[field] = outputs * (1 + wanted) + of_prompts
        if fields.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompts * (1 + fields.prompt_logprobs)
        if self.decision is not None:
            found["structured_outputs"] = self.num_choices * len(self.decision.choices)
        if fields.return_token_ids:
            found["return_token_ids"] = -(-(prompts + outputs) // TOKEN_IDS_A_LOGPROB)
        return found


def make_plan(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[Sequence[int]],
    *,
    max_model_len: int,
    vocab_size: int,
    default_max_tokens: int,
    echoes: Sequence[Spelling] = (),
    reading: Reading = PLAIN,
    decision: Decision | None = None,
) -> GenerationPlan:
    """Raises ApiError (400) where a token id is none of the model's, a prompt with its answer is too long, or the
    answer would hold too many log probabilities."""
    field, asked = request.asked_tokens
    source = "messages" if isinstance(request, ChatRequest) else "prompt"
    max_tokens = []
    longest = 0 if decision is None else max(map(len, decision.longer), default=0)
    for prompt in prompts:
        if not prompt:
            raise invalid(source, f"'{source}' has no tokens: give at least one.")
        _check_ids(source, prompt, vocab_size)
        room = max_model_len - len(prompt)
        if asked is not None and request.ENDS_WITH_CONTEXT:
            asked = max(1, min(asked, room))
        needed = max(1 if asked is None else asked, longest)
        if needed > room:
            raise invalid(
                source if room < min(1, needed) else field,
                _too_long(len(prompt), asked, request.client_field(source), max_model_len),
                "context_length_exceeded",
            )
        max_tokens.append(asked if asked is not None else min(room, default_max_tokens))
    if (request.min_tokens or 0) > min(max_tokens):
        raise invalid(
            "min_tokens", f"'min_tokens' is larger than the answer may be ({min(max_tokens)} tokens)."
        )
    _check_ids("logit_bias", (token_id for token_id, _ in request.logit_bias), vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids or (), vocab_size)
    _check_ids("logprob_token_ids", request.logprob_token_ids or (), vocab_size)
    plan = GenerationPlan(
        request,
        tuple(map(tuple, prompts)),
        tuple(max_tokens),
        asked,
        field,
        tuple(echoes),
        reading,
        decision=decision,
    )
    _check_logprobs(plan)
    return plan


def _check_logprobs(plan: GenerationPlan) -> None:
    if plan.max_logprobs > MAX_LOGPROBS:
        by_field = plan.logprobs_by_field
        raise invalid(
            max(by_field, key=by_field.__getitem__),
            f"The answer could have {plan.max_logprobs} log probabilities; at most {MAX_LOGPROBS} are allowed. "
            f"Those of likely tokens count, and {TOKEN_IDS_A_LOGPROB} token ids count as one. Ask for fewer "
            "tokens, choices, prompts or likely tokens.",
        )


def _too_long(num_prompt: int, asked: int | None, source: str, max_model_len: int) -> str:
    """Clients know this error by its words: LiteLLM by the first sentence, LangChain by "prompt is too long", which
    stands wherever a shorter prompt would help."""
    limit = f"This model's maximum context length is {max_model_len} tokens."
    wanted = f"{num_prompt} in the {source}" + (f", {asked} for the answer" if asked else "")
    if num_prompt >= max_model_len:
        return f"{limit} However, your prompt is too long: {wanted}. Please shorten the {source}."
    if asked is not None and asked >= max_model_len:
        return f"{limit} However, your request asks for more: {wanted}. Please shorten the answer."
    return (
        f"{limit} However, your prompt is too long for such an answer: {wanted}. Please shorten the {source} or "
        "the answer."
    )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(field, f"'{field}' has token id {highest}, beyond the model's {vocab_size} tokens.")


def engine_requests(
    plan: GenerationPlan,
    *,
    internal_id: str,
    tenant_id: str,
    adapter: AdapterRef | None,
    max_output_tokens: int | None,
    deadline_s: float | None = None,
    max_load_s: float | None = None,
    background: bool = False,
) -> list[EngineRequest]:
    """One for each choice, in the order of their indices: all choices of the first prompt, then the next's. A prompt
    is scored with its first choice. `max_output_tokens` is what the limits leave for each answer, `deadline_s` what is
    left of the request's time, `max_load_s` how long it waits for its adapter."""
    fields = plan.request
    ends = () if fields.ignore_eos or fields.pooling is not None else plan.end_ids
    seed = fields.seed if fields.seed is not None else secrets.randbits(63)
    common = fields.sampling(
        max_tokens=0,
        seed=seed & SEED_MASK,
        stop_token_ids=tuple(dict.fromkeys((*(fields.stop_token_ids or ()), *ends))),
        # Tokens that the request names take the place of the most likely ones.
        logprobs=fields.wanted_logprobs if fields.logprob_token_ids is None else 0,
        logprob_token_ids=plan.named,
    )
    requests = []
    for index in range(plan.num_choices):
        of_prompt, choice = divmod(index, plan.n)
        place = plan.places[of_prompt] if plan.places else 0
        max_tokens = plan.max_tokens[of_prompt]
        if max_output_tokens is not None:
            max_tokens = min(max_tokens, max_output_tokens)
        sampling = replace(
            common,
            max_tokens=max_tokens,
            choice=choice,
            min_tokens=min(common.min_tokens, max_tokens),
            prompt_logprobs=_prompt_logprobs(plan) if choice == 0 else None,
            prompt_ranks=choice == 0 and fields.prompt_logprobs is not None,
        )
        requests.append(
            EngineRequest(
                request_id=f"{internal_id}-{index}",
                tenant_id=tenant_id,
                prompt_ids=plan.prompts[of_prompt],
                sampling=sampling,
                adapter=None if place is None else adapter,
                adapter_from=place or 0,
                priority=fields.priority or 0,
                deadline=deadline_s,
                max_load=max_load_s,
                grammar=plan.grammar,
                pooling=fields.pooling,
                speculation=fields.speculation is not False,
                background=background,
                batch=background,
            )
        )
    return requests


def _prompt_logprobs(plan: GenerationPlan) -> int | None:
    """Likely tokens for each of a prompt: the echo and `prompt_logprobs` each take as many of them as they show."""
    echoed = plan.request.wanted_logprobs if plan.echoes else None
    return max((asked for asked in (echoed, plan.request.prompt_logprobs) if asked is not None), default=None)
