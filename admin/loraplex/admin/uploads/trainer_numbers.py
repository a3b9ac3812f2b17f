"""A trainer's token ids and log probabilities as clients send them: in a report's body, or beside a push."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from loraplex.adapters.admission.strict_json import parse_object
from loraplex.admin.problem import Problem, from_validation
from loraplex.admin.schemas import series as shown
from loraplex.admin.uploads.push_form import AGREEMENT_NAME
from loraplex.control.agreement import TrainerNumbers
from loraplex.engine.reports import EngineInfo


def read_numbers(data: bytes, info: EngineInfo) -> TrainerNumbers:
    """Read the part `agreement` of a push, a JSON object as `AgreementRequest` has it. Raises Problem (400) that names
    the place of what is wrong."""
    try:
        parse_object(data)
    except ValueError as error:
        detail = f"The part {AGREEMENT_NAME} must be a JSON object, and cannot be read as one: {error}."
        raise Problem("invalid_value", detail, param=AGREEMENT_NAME) from None
    try:
        body = shown.AgreementRequest.model_validate_json(data, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise from_validation([one | {"loc": (AGREEMENT_NAME, *one["loc"])} for one in found]) from None
    return check_numbers(body, info, f"{AGREEMENT_NAME}.")


def check_numbers(body: shown.AgreementRequest, info: EngineInfo, place: str = "") -> TrainerNumbers:
    """Check token ids and log probabilities by the limits of a comparison and those of the model. Raises Problem (400)
    that names where they are wrong, behind `place`."""
    in_tokens, in_logprobs = f"{place}tokens", f"{place}logprobs"
    tokens, given = _several(in_tokens, body.tokens), _several(in_logprobs, body.logprobs)
    if len(tokens) != len(given):
        raise _wrong(in_logprobs, f"has {len(given)} sequences, and tokens has {len(tokens)}")
    if (count := sum(map(len, tokens))) > shown.MAX_TOKENS:
        raise _wrong(in_tokens, f"has {count} tokens; at most {shown.MAX_TOKENS} are compared at a time")
    ids = [_ids(one, f"{in_tokens}.{index}", info) for index, one in enumerate(tokens)]
    theirs = [_from_second(one, len(ids[index]), f"{in_logprobs}.{index}") for index, one in enumerate(given)]
    return TrainerNumbers(ids, theirs)


def _several(field: str, given: list[Any]) -> list[list[Any]]:
    """One sequence, or several, as several."""
    if not any(isinstance(one, list) for one in given):
        return [given]
    if not all(isinstance(one, list) for one in given):
        raise _wrong(field, "is neither one sequence nor a list of sequences")
    if len(given) > shown.MAX_SEQUENCES:
        raise _wrong(
            field, f"has {len(given)} sequences; at most {shown.MAX_SEQUENCES} are compared at a time"
        )
    return given


def _ids(given: list[Any], where: str, info: EngineInfo) -> list[int]:
    if not 2 <= len(given) <= info.max_model_len:
        raise _wrong(where, f"has {len(given)} tokens; a sequence has from 2 to {info.max_model_len}")
    for place, token_id in enumerate(given):
        if type(token_id) is not int or not 0 <= token_id < info.vocab_size:  # true is an int to Python
            told = f"is no token id, which is a whole number from 0 to {info.vocab_size - 1}"
            raise _wrong(f"{where}.{place}", told)
    return given


def _from_second(given: list[Any], num_tokens: int, where: str) -> list[float]:
    if len(given) not in (num_tokens - 1, num_tokens):
        told = f"has {len(given)} entries for {num_tokens} tokens: one for each, null for the first, or that left out"
        raise _wrong(where, told)
    start = len(given) - num_tokens + 1
    if start and given[0] is not None:
        raise _wrong(f"{where}.0", "has to be null: nothing precedes the first token")
    for place, value in enumerate(given[start:], start):
        low, high = shown.LOWEST_LOGPROB, shown.HIGHEST_LOGPROB
        if type(value) not in (int, float) or not low <= value <= high:
            told = f"is no log probability, which is a number from {low:g} to 0 ({high:g} more is taken for rounding)"
            raise _wrong(f"{where}.{place}", told)
    return [float(value) for value in given[start:]]


def _wrong(where: str, told: str) -> Problem:
    return Problem("invalid_value", f"{where} {told}.", param=where)
