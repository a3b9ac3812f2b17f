"""Regular expressions of an upload, matched in linear time.

PEFT gives the keys of alpha_pattern to Python's `re`, which backtracks: one key can take it years. RE2 reads most of
the same syntax and matches in time linear to program and text (Russ Cox, "Regular Expression Matching in the Wild").
Where both read a construct, they may still mean different things by it, so only constructs are taken that mean the same
to both on ASCII text without line breaks: literal characters, ".", classes of letters, digits and punctuation, \\d \\w
\\s \\b and their opposites, groups with and without a name, "|", "^", "$", and repetition, greedy or lazy. Look-around,
references, flags, possessive repetition, \\A, \\Z and characters beyond ASCII are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import re2

MAX_EXPRESSION_CHARS = 1024
MAX_EXPRESSIONS = 64
MAX_WORK = 100_000_000
"""Instructions times characters, over all expressions of a config: less than a second. A limit of work gives the same
verdict on a busy server as on an idle one, at the upload as at each load. A limit of time does not."""
_MAX_PROGRAM_BYTES = 1 << 17
"""RE2's bound for one program and its states. Its Python module remembers 128 programs."""

_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_.-]*")
_IN_CLASS = r"[A-Za-z0-9]-[A-Za-z0-9]|[A-Za-z0-9_.|*+?(){}$,:/]|\\[dDwWsS.\-/|*+?(){}$^\[\]]"
_TOKENS = re.compile(
    rf"""
      (?P<atom>     [A-Za-z0-9_,:/-] | \. | \\[dDwWsS.^$*+?{{}}\[\]|()/-] | \[\^?-?(?:{_IN_CLASS})+-?\] )
    | (?P<open>     \((?:\?:|\?P<[A-Za-z_][A-Za-z0-9_]{{0,31}}>)? (?!\?) )
    | (?P<close>    \) )
    | (?P<between>  \| | \^ | \$ | \\[bB] )
    | (?P<repeat>   (?:[*+?] | \{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}}) \?? )
    """,
    re.VERBOSE,
)


class ExpressionRefused(ValueError):
    """An expression is not evaluated; the message says why. `expression` None: the sum of them is too much."""

    def __init__(self, why: str, expression: str | None = None) -> None:
        super().__init__(why)
        self.expression = expression


def match_paths(expressions: Sequence[str], paths: Iterable[str]) -> list[list[str]]:
    """The paths that each expression matches as PEFT's get_pattern_key does: the whole path, or its end behind a ".".

    Raises ExpressionRefused.
    """
    if len(expressions) > MAX_EXPRESSIONS:
        raise ExpressionRefused(
            f"there are {len(expressions)} of them; at most {MAX_EXPRESSIONS} are evaluated"
        )
    texts = list(paths)
    if not all(_PLAIN_TEXT.fullmatch(text) for text in texts):
        raise ExpressionRefused("modules of the base have names beyond letters, digits, '_' and '-'")
    length = sum(len(text) for text in texts)
    options = _options()
    programs = []
    work = 0
    for expression in expressions:
        program = _compile(expression, options)
        work += program.programsize * length
        programs.append(program)
    if work > MAX_WORK:
        raise ExpressionRefused("to match them with every module of the base takes too long")
    return [[text for text in texts if program.match(text)] for program in programs]


def check_syntax(expression: str) -> str | None:
    """Why the expression is not built of the constructs that `re` and RE2 mean the same by; None if it is."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        return f"it is longer than {MAX_EXPRESSION_CHARS} characters"
    at, depth, repeatable = 0, 0, False
    names: set[str] = set()
    while at < len(expression):
        token = _TOKENS.match(expression, at)
        if token is None:
            return f"{expression[at : at + 8]!a} is none of the constructs that are evaluated"
        kind = token.lastgroup
        if kind == "repeat" and not repeatable:
            return f"{token[0]!a} at character {at + 1} has nothing to repeat"
        if token[0].startswith("(?P<"):
            if token[0] in names:  # RE2 takes one inside another
                return f"{token[0]!a} names two groups"
            names.add(token[0])
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            return "a ')' closes no group"
        repeatable = kind in ("atom", "close")
        at = token.end()
    return "a group is not closed" if depth else None


def _compile(expression: str, options: re2.Options) -> re2._Regexp:
    wrong = check_syntax(expression)
    if wrong is not None:
        raise ExpressionRefused(wrong, expression)
    try:
        return re2.compile(rf"(.*\.)?({expression})$", options)
    except re2.error as error:
        why = error.args[0] if error.args else b""
        reason = why.decode("ascii", "replace") if isinstance(why, bytes) else str(why)
        raise ExpressionRefused(reason[:80], expression) from None


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = _MAX_PROGRAM_BYTES
    options.log_errors = False
    options.never_capture = True
    return options
