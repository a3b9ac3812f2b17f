"""The tokens that end a turn: one answer from all that a base model, or a version, says about them.

Files of one model often disagree: config.json names the end of a text, the chat template writes the end of a turn. Then
an answer ends at each of these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.errors import BaseModelInvalid
from loraplex.adapters.generation_settings import STOP_STRINGS, NotFollowed, not_followed, stop_strings
from loraplex.adapters.store.files import shown

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, FAMILY = "the chat template", "the model type"
NAMED_ENDS = ("eos_token", "eot_token", "eom_token", "fim_pad_token", "fim_rep_token", "fim_sep_token")
"""Names under which a tokenizer has tokens that end an answer. llama.cpp has the last five too."""
FAMILY_ENDS = dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "<end_of_turn>") | {
    "phi3": "<|end|>"
}
"""The token that ends a turn, by model type: for a base without a chat template."""


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends a turn: its id, how the vocabulary writes it, and who says so."""

    id: int
    token: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The tokens that one source names, by their ids or as the vocabulary writes them. `special`: only special tokens
    are taken."""

    source: str
    tokens: tuple[int | str, ...]
    special: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. `name_of` gives None for an id that is out of range."""

    id_of: Callable[[str], int | None]
    name_of: Callable[[int], str | None]
    special: Collection[int]


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end a turn, `found` by their ids. `lacking`: tokens that are named, and that the vocabulary
    does not have. `disagreement`: which sources name tokens that another does not, in words; empty where none
    does."""

    found: tuple[EndToken, ...]
    lacking: tuple[str, ...] = ()
    disagreement: str = ""

    @property
    def warning(self) -> str:
        """A sentence without its end on sources that disagree, or name what the vocabulary does not have; else ""."""
        words = [self.disagreement] if self.disagreement else []
        words += (
            [f"the vocabulary has no {', '.join(self.lacking)}, which a file names"] if self.lacking else []
        )
        return "; ".join(words)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(end.id for end in self.found)


def decide(claims: Sequence[Claim], vocabulary: Vocabulary) -> EndTokens:
    """Which tokens end a turn. The first claim that names any is the one that others are compared with."""
    sources: dict[int, list[str]] = {}
    lacking: dict[str, None] = {}
    named: list[tuple[str, list[int]]] = []
    for claim in claims:
        ids = []
        for token in claim.tokens:
            number = vocabulary.id_of(token) if isinstance(token, str) else token
            if number is None or vocabulary.name_of(number) is None:
                lacking[shown(token) if isinstance(token, str) else f"token {token}"] = None
            elif not claim.special or number in vocabulary.special:
                ids.append(number)
                if claim.source not in sources.setdefault(number, []):
                    sources[number].append(claim.source)
        if ids:
            named.append((claim.source, ids))
    found = tuple(
        EndToken(number, vocabulary.name_of(number) or "", tuple(sources[number]))
        for number in sorted(sources)
    )
    return EndTokens(found, tuple(lacking), _disagreement(named, {end.id: end.token for end in found}))


def _disagreement(named: Sequence[tuple[str, Sequence[int]]], tokens: Mapping[int, str]) -> str:
    if not named:
        return ""
    first, known = named[0]
    more = [(source, ids) for source, ids in named[1:] if not set(ids) <= set(known)]
    if not more:
        return ""

    def told(source: str, ids: Sequence[int]) -> str:
        return f"{source} says " + " and ".join(f"{shown(tokens[number])} ({number})" for number in ids)

    return "; ".join(told(*each) for each in ((first, known), *more))


def read_end_tokens(model_dir: Path, written: Sequence[str] = ()) -> EndTokens:
    """The tokens that end a turn of a base model, from its directory. `written`: the tokens that its chat template
    writes behind an answer. Raises BaseModelInvalid where a file cannot be read."""
    config, tokenizer_config = _object(model_dir / CONFIG), _object(model_dir / TOKENIZER_CONFIG)
    text = config.get("text_config")
    ids = _ids(config) or (_ids(text) if isinstance(text, dict) else ())
    settings = _object(model_dir / GENERATION)
    generation = _ids(settings)
    special_map = _object(model_dir / "special_tokens_map.json")
    family = FAMILY_ENDS.get(str(config.get("model_type")))
    tokenizer = _object(model_dir / TOKENIZER)
    added = _added(tokenizer_config, tokenizer)
    claims = [
        Claim(GENERATION, generation),
        # Where the other names some, these may be a default that nobody chose.
        Claim(CONFIG, ids, special=bool(generation)),
        # To another family the name of a token means nothing.
        Claim(FAMILY, (family,) if family in added else ()),
    ]
    for name in NAMED_ENDS:
        for file, fields in (
            ("tokenizer_config.json", tokenizer_config),
            ("special_tokens_map.json", special_map),
        ):
            if (token := _content(fields.get(name))) in added:
                claims.append(Claim(f"{file}'s {name}", (token,)))
                break
    stops = tuple(token for token in stop_strings(settings) if token in added)
    claims += [Claim(f"{GENERATION}'s {STOP_STRINGS}", stops), Claim(TEMPLATE, tuple(written))]
    names = _words(tokenizer) | {number: token for token, (number, _) in added.items()}
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    most = size if type(size) is int else 1 << 31
    vocabulary = Vocabulary(
        lambda token: added[token][0] if token in added else None,
        lambda number: names.get(number, "") if 0 <= number < most else None,
        {number for number, special in added.values() if special},
    )
    return decide(claims, vocabulary)


def read_not_followed(model_dir: Path) -> NotFollowed | None:
    """The settings of a base's generation_config.json that ask for what is not done. Raises BaseModelInvalid."""
    added = added_tokens(model_dir)
    return not_followed(_object(model_dir / GENERATION), added.__contains__)


def added_tokens(model_dir: Path) -> dict[str, tuple[int, bool]]:
    """The tokens that a tokenizer has beside its model's, with their ids and whether they are special. Raises
    BaseModelInvalid."""
    return _added(_object(model_dir / TOKENIZER_CONFIG), _object(model_dir / TOKENIZER))


def _added(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    found: dict[str, tuple[int, bool]] = {}
    listed = config.get("added_tokens_decoder")
    for key, token in listed.items() if isinstance(listed, dict) else ():
        if key.isdigit() and isinstance(token, dict) and (content := _content(token)):
            found[content] = int(key), bool(token.get("special"))
    tokens = tokenizer.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int and (content := _content(token)):
            found[content] = token["id"], bool(token.get("special"))
    return found


def _words(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """The words of a tokenizer's model by their ids, where it lists them so."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    listed = vocab.items() if isinstance(vocab, dict) else ()
    return {number: word for word, number in listed if type(number) is int}


def _content(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids: list[Any] = value if isinstance(value, list) else [value]
    return tuple(number for number in ids if type(number) is int)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file does not exist. Raises BaseModelInvalid."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BaseModelInvalid(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise BaseModelInvalid(f"{path} is not a JSON object")
    return value
