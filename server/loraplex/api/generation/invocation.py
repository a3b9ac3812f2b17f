"""Where an activated LoRA (aLoRA) begins to act in a prompt.

As PEFT has it: at the first token of the last occurrence of its invocation in the ids that are given. An invocation
that the model generates changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from loraplex.adapters.invocation import find_invocation
from loraplex.api.errors import ApiError
from loraplex.api.generation.kinds import Prompts
from loraplex.api.generation.tool_use import Reading
from loraplex.control.types import ResolvedModel
from loraplex.serving.text.processor import Spelling


def invoke(
    prompts: Prompts,
    model: ResolvedModel,
    source: str,
    spell: Callable[[Sequence[int]], Spelling],
    read: Callable[[Sequence[int]], Reading] | None = None,
) -> tuple[Prompts, tuple[int | None, ...]]:
    """The prompts for a model with an activated adapter, and the first position of each at which it acts: None where
    the base is to answer. The version's setting decides over prompts without its invocation.

    Raises ApiError (400 adapter_not_invoked). `source` is the field that prompts come from; `read` says how the answer
    to a chat's prompt is read. Its time grows with the prompts': call it in a worker thread."""
    ref = model.adapter
    assert ref is not None
    token_ids = list(prompts.token_ids)
    echoes = list(prompts.echoes)
    reading = prompts.reading
    places = [find_invocation(ids, ref.invocation) if ids else 0 for ids in token_ids]
    for number, place in enumerate(places):
        if place is not None or model.serving.alora == "base":
            continue
        if model.serving.alora is None:
            raise ApiError("adapter_not_invoked", _missing(model, source), param=source)
        places[number] = len(token_ids[number])
        token_ids[number] = [*token_ids[number], *ref.invocation]
        if number < len(echoes):  # a prompt that is too long has none, and is refused for it
            echoes[number] = _behind(echoes[number], spell(ref.invocation))
        if read is not None:
            reading = read(token_ids[number])  # what the template had opened at its end is not open any more
    return replace(prompts, token_ids=token_ids, echoes=echoes, reading=reading), tuple(places)


def appended_invocation(model: ResolvedModel) -> tuple[int, ...]:
    """Token ids that the version puts at the end of a prompt that lacks them; empty for all others."""
    return () if model.adapter is None or model.serving.alora != "append" else model.adapter.invocation


def with_invocation(token_ids: Sequence[int], invocation: Sequence[int]) -> Sequence[int]:
    """The tokens of a prompt as `invoke` makes them, given what is appended. Without any, a prompt has no tokens."""
    if not token_ids or not invocation or find_invocation(token_ids, invocation) is not None:
        return token_ids
    return [*token_ids, *invocation]


def _behind(first: Spelling, second: Spelling) -> Spelling:
    length = len(first.text)
    spans = ((length + start, length + end) for start, end in second.spans)
    return Spelling(first.text + second.text, (*first.spans, *spans))


def _missing(model: ResolvedModel, source: str) -> str:
    ref = model.adapter
    assert ref is not None
    ids = ", ".join(map(str, ref.invocation))
    return (
        f"'{source}' lacks the invocation of {ref.name}@v{ref.version}: the adapter acts from the token ids [{ids}] on "
        "and would not act at all. Put their text into the prompt as the training did, or push the version with "
        "serving.alora set to append or base."
    )
