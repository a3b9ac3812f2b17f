"""A version's own files for its chats, compared with its base's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.admission.chat_files import ChatFiles, OwnChat
from loraplex.adapters.end_tokens import (
    GENERATION,
    NAMED_ENDS,
    TEMPLATE,
    Claim,
    EndTokens,
    Vocabulary,
    decide,
)
from loraplex.adapters.generation_settings import STOP_STRINGS, not_followed, stop_strings
from loraplex.adapters.store.files import shown
from loraplex.serving.text.processor import TextProcessor

TEMPLATE_CHECK, ENDS_CHECK, TOKENIZER_CHECK = "chat template", "ends of answers", "tokenizer"
GENERATION_CHECK = "generation config"
"""Their names in a report."""
_MAX_NAMED = 4
_OWN_ALONE = "only on a server that is started with --adapter-templates own"


@dataclass(frozen=True, slots=True)
class ChatFound:
    """`own` is None where nothing differs from the base; `checks` are for the report."""

    own: OwnChat | None = None
    checks: tuple[Mapping[str, Any], ...] = ()


def compare_chat(
    files: ChatFiles,
    text: TextProcessor,
    base_eos_ids: Collection[int],
    *,
    own_serves: bool,
    written: Sequence[str] = (),
) -> ChatFound:
    """Compare a version's chat with the base's. `own_serves`: this server renders chats with versions' own templates.
    `written`: the tokens that the version's template writes behind an answer."""
    checks: list[Mapping[str, Any]] = []
    templates = {} if _is_equal(files.templates, text.template_sources) else files.templates
    if templates:
        checks.append(_template_check(own_serves))
        lacking = [token for token in files.added if text.token_id(token) is None]
        if lacking:
            named = ", ".join(shown(token) for token in lacking[:_MAX_NAMED])
            more = ", …" if len(lacking) > _MAX_NAMED else ""
            checks.append(
                _check(
                    TEMPLATE_CHECK,
                    f"warning: the base's tokenizer lacks {len(lacking)} tokens of the version's ({named}{more}): "
                    "where its template writes them, they are read as plain text",
                    ok=False,
                )
            )
    elif files.templates:
        checks.append(_check(TEMPLATE_CHECK, "it is the base's", ok=True))
    ends = _ends(files, text, written if templates else ())
    checks += [
        _check(
            ENDS_CHECK,
            f"warning: the base's tokenizer lacks {token}, which ends the version's answers; it is ignored",
            ok=False,
        )
        for token in ends.lacking
    ]
    ids = tuple(number for number in ends.ids if number not in base_eos_ids)
    if ids:
        checks.append(_ends_check(text.names(ids), ids, own_serves))
    if asked := not_followed(files.generation, lambda token: text.token_id(token) is not None):
        detail = f"{'warning: ' if asked.of_none else ''}{asked.told}"
        checks.append(_check(GENERATION_CHECK, detail, ok=not asked.of_none))
    own = OwnChat(templates, files.special_tokens if templates else {}, ids)
    return ChatFound(own if templates or ids else None, tuple(checks))


def _is_equal(given: Mapping[str, str], base: Mapping[str, str]) -> bool:
    """Whether a base that has these templates renders as the given ones do; files end with a newline, or do not."""
    return all(name in base and text.rstrip() == base[name].rstrip() for name, text in given.items())


def _template_check(own_serves: bool) -> Mapping[str, Any]:
    if own_serves:
        return _check(TEMPLATE_CHECK, "it differs from the base's, and renders the version's chats", ok=True)
    return _check(
        TEMPLATE_CHECK,
        f"warning: it differs from the base's. The base's renders the version's chats; its own does {_OWN_ALONE}",
        ok=False,
    )


def _ends(files: ChatFiles, text: TextProcessor, written: Sequence[str]) -> EndTokens:
    """The tokens of the base that end the version's turns by what it brings."""
    named = [
        Claim(name, (files.special_tokens[name],)) for name in NAMED_ENDS if name in files.special_tokens
    ]
    stops = tuple(token for token in stop_strings(files.generation) if text.token_id(token) is not None)
    claims = [
        Claim(GENERATION, files.eos_ids),
        *named,
        Claim(f"{GENERATION}'s {STOP_STRINGS}", stops),
        Claim(TEMPLATE, tuple(written)),
    ]
    return decide(claims, Vocabulary(text.token_id, lambda number: _name(text, number), ()))


def _name(text: TextProcessor, number: int) -> str | None:
    return text.names([number])[0] if number < text.vocab_size else None


def _ends_check(names: Sequence[str], ids: Sequence[int], own_serves: bool) -> Mapping[str, Any]:
    listed = ", ".join(f"{shown(name)} ({number})" for name, number in zip(names, ids, strict=True))
    if own_serves:
        return _check(ENDS_CHECK, f"the version's answers end with {listed} too", ok=True)
    return _check(
        ENDS_CHECK,
        f"warning: the version's answers end with {listed} too, which the base's do not: they end there {_OWN_ALONE}",
        ok=False,
    )


def _check(name: str, detail: str, *, ok: bool) -> Mapping[str, Any]:
    return {"name": name, "ok": ok, "detail": detail}
