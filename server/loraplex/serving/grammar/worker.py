"""The process that checks grammars: `python -m loraplex.serving.grammar.worker FD`.

It loads the model's tokenizer once, and its forks check grammars: llguidance's own limits do not bound what building
one costs.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from loraplex.engine.grammar.dictated import DictatesTooMuch, dictated_text
from loraplex.engine.grammar.tokenizer import GrammarsUnsupported, load_grammar_tokenizer, new_matcher
from loraplex.serving.forks.worker import SetupFailed, Work, serve_forks
from loraplex.serving.grammar.messages import Check, Checked, CheckerSetup

WALKED_TOKENS = 32
"""Tokens sampled from the grammar by way of trial: a grammar that builds quickly may have slow masks, or none. A text
that it dictates counts as one."""
MAX_REASON = 600
_NO_TEXT = "NoExtension"
_NOT_VERBOSE = "\n<non-verbose/>"


def set_up(setup: bytes) -> Work:
    model = msgspec.msgpack.decode(setup, type=CheckerSetup)
    try:
        tokenizer = load_grammar_tokenizer(Path(model.model_dir), model.eos_ids)
    except GrammarsUnsupported as error:
        raise SetupFailed(error.message) from error

    def work(body: bytes) -> bytes:
        return msgspec.msgpack.encode(_check(msgspec.msgpack.decode(body, type=Check), tokenizer))

    return work


def _check(check: Check, tokenizer: LLTokenizer) -> Checked:
    try:
        text = _lark(check.text) if check.gbnf else check.text
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # the library raises plain ones
        return Checked(str(error)[:MAX_REASON])
    return Checked(_trial(text, tokenizer) or None, text if check.gbnf else "")


def _lark(text: str) -> str:
    return msgspec.json.encode({"grammars": [{"lark_grammar": gbnf_to_lark(text)}]}).decode()


def _trial(text: str, tokenizer: LLTokenizer) -> str:
    """Builds the grammar and samples a few tokens from it. Returns why it is refused, "" where it is not."""
    matcher = new_matcher(tokenizer, text)
    chance = random.Random(0)  # noqa: S311 - the same verdict each time
    for _ in range(WALKED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        try:
            follows = matcher.compute_ff_tokens() if dictated_text(matcher) else []
        except DictatesTooMuch as fault:
            return str(fault)
        if follows and not any(map(tokenizer.is_special_token, follows)):
            matcher.consume_tokens(follows)
            continue
        mask = matcher.compute_bitmask()
        if matcher.is_error() or (token := _drawn(mask, chance)) is None:
            break
        # The end; or text that is spelled like such a token, which engines handle.
        if tokenizer.is_special_token(token):
            break
        matcher.consume_token(token)
    reason = str(matcher.get_error()) if matcher.is_error() else ""
    if reason.startswith(_NO_TEXT) or (matcher.is_stopped() and not matcher.is_accepting() and not reason):
        return "no text fits it"
    return reason.split(_NOT_VERBOSE)[0][:MAX_REASON]


def _drawn(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens that the mask allows, none where it allows none."""
    start = chance.randrange(len(mask))
    for index in itertools.chain(range(start, len(mask)), range(start)):
        if mask[index]:
            bits = [bit for bit in range(8) if mask[index] >> bit & 1]
            return index * 8 + chance.choice(bits)
    return None


if __name__ == "__main__":
    serve_forks(set_up)
