"""A comparison of two tokenizers: what they know, the parts that they are made of, and the tokens of some probes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from loraplex.adapters.store.files import shown

PROBES = (
    "Hello world", " Hello", "Hello ", "a  b   c", "a\nb", "a\n\nb", "\n\n1. one", "\n  - two", "  indented", "\ttab",
    "end.   ", "2026", "1234567", "3.14", "1,000", "in 2026", "v2.0.1", "x1y22", "\u00bd \u00b2 \u2167", "don't",
    "DON'T", "I'll 's", "f(x)!=[1, 2];", '{"a": 1}', "a_b->c", "http://a.b/c?d=1", "caf\u00e9", "cafe\u0301",
    "\ufb01 \uff21", "na\u00efve", "\u4e2d\u6587\u3002", "\u041f\u0440\u0438",
    "\u0639\u0631\u0628 \u0661\u0662", "\u0939\u093f",
    "\U0001f469\u200d\U0001f4bb ok", "UPPER lower", "a\r\nb", "a\u00a0b\u3000c", "",
)  # fmt: skip
"""Texts in which tokenizers differ."""
_BEHIND = ("Hello", " Hello", "\nHello", "1", "")
"""The same behind a special token."""
_MOST_SPECIAL = 4
_MOST_NAMED = 4
_MOST_TOKENS = 8
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_OF_MODEL = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "max_input_chars_per_word",
)  # fmt: skip
_ORDERS = {"BPE": ("merges", b'"merges":'), "Unigram": ("scores", b'"unk_id":')}
"""The name of what decides between two ways to part a word, and where it begins at the end of the written model, by the
kind of the model."""


@dataclass(frozen=True, slots=True)
class Example:
    """A text, and its tokens by each of the two."""

    text: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def told(self, ours: str, theirs: str) -> str:
        """Describe the example; `ours` and `theirs` name the two."""
        return f"{shown(self.text, 40)} is {_listed(self.ours)} {ours} and {_listed(self.theirs)} {theirs}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two tokenizers. `missing` are tokens that the second has and the first lacks, or has under
    another id, `parts` the names of parts that differ, `probes` the number of texts with other tokens among `tried`,
    and `example` the shortest of them."""

    missing: tuple[str, ...]
    parts: tuple[str, ...]
    probes: int
    tried: int
    example: Example | None

    def told(self, ours: str, theirs: str) -> str:
        """A sentence without its end. `ours` and `theirs` say by which of the two."""
        found = []
        if self.example is not None:
            found.append(
                f"{self.probes} of {self.tried} texts have other tokens: {self.example.told(ours, theirs)}"
            )
        if self.missing:
            named = ", ".join(shown(token) for token in self.missing[:_MOST_NAMED])
            more = ", …" if len(self.missing) > _MOST_NAMED else ""
            found.append(f"{len(self.missing)} tokens have no id, or another, {ours} ({named}{more})")
        if not found:
            found.append(f"{', '.join(self.parts)} differ, though {self.tried} texts have the same tokens")
        return "; ".join(found)


def load_tokenizer(text: str) -> Tokenizer:
    """The tokenizer of a JSON, which neither cuts nor pads. The library raises plain Exceptions for what is none."""
    tokenizer: Tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def compare(ours: Tokenizer, theirs: Tokenizer) -> Difference | None:
    """The difference, None where both know the same tokens, have the same parts and choose alike between tokens."""
    parts = [_parts(tokenizer) for tokenizer in (ours, theirs)]
    differing = tuple(name for name in parts[0] if parts[0][name] != parts[1][name])
    known = [tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (ours, theirs)]
    missing = () if known[0] == known[1] else tuple(t for t, i in known[1].items() if known[0].get(t) != i)
    if not differing and not missing:
        return None
    tried = [*PROBES, *_behind_special(ours)]
    examples = []
    for text in tried:
        first, second = ours.encode(text), theirs.encode(text)
        if first.ids != second.ids:
            examples.append(Example(text, tuple(first.tokens), tuple(second.tokens)))
    example = min(examples, key=lambda each: len(each.text), default=None)
    return Difference(missing, differing, len(examples), len(tried), example)


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Parts of a tokenizer beside its vocabulary."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {
        **{name: _effective(_written(getattr(tokenizer, name))) for name in _PARTS},
        "post_processor": _added_around(_written(tokenizer.post_processor)),
        "model": {name: getattr(tokenizer.model, name, None) or None for name in _OF_MODEL},
        **{name: _digest(tokenizer, kind, mark) for kind, (name, mark) in _ORDERS.items()},
        "added_tokens": {
            each.content: (each.special, each.normalized, each.lstrip, each.rstrip, each.single_word)
            for each in added
        },
    }


def _digest(tokenizer: Tokenizer, kind: str, mark: bytes) -> bytes | None:
    """The digest of a model of this kind from the last mark on; None of another. To parse it would take too long."""
    if type(tokenizer.model).__name__ != kind:
        return None
    written: bytes = tokenizer.model.__getstate__()
    return hashlib.sha256(written[written.rindex(mark) :]).digest()


def _written(part: Any) -> Any:
    """A part as the library writes it into a file."""
    return None if part is None else json.loads(part.__getstate__())


def _effective(part: Any) -> Any:
    """A part without the fields that are off, and without that of offsets."""
    if isinstance(part, Mapping):
        return {name: _effective(value) for name, value in part.items() if value and name != "trim_offsets"}
    return [_effective(each) for each in part] if isinstance(part, list) else part


def _added_around(part: Any) -> Any:
    """The tokens that a post-processor puts around a text; None where there are none."""
    kind = part["type"] if isinstance(part, Mapping) else None
    if kind == "Sequence":
        found = [added for each in part["processors"] if (added := _added_around(each)) is not None]
        return found or None
    if kind in (None, "ByteLevel") or (kind == "TemplateProcessing" and not part["special_tokens"]):
        return None
    return part


def _behind_special(tokenizer: Tokenizer) -> Iterable[str]:
    added = tokenizer.get_added_tokens_decoder()
    special = [added[number].content for number in sorted(added) if added[number].special]
    return [f"{token}{text}" for token in special[-_MOST_SPECIAL:] for text in _BEHIND]


def _listed(tokens: tuple[str, ...]) -> str:
    more = " …" if len(tokens) > _MOST_TOKENS else ""
    return " ".join(shown(token, 20) for token in tokens[:_MOST_TOKENS]) + more
