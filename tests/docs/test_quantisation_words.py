"""The table of quantisation settings in docs/models.md is the one that the code decides by."""

from __future__ import annotations

from loraplex.adapters.base_weights.words import AWQ, CHANGES, CHANGING_WORDS, GPTQ, OF_RULES, Words
from support.markdown import read


def _served(of: Words, name: str) -> str:
    if name not in of.values:
        return "neutral"
    return ", ".join(f"`{str(value).lower()}`" for value in of.values[name] if value is not None)


def table() -> str:
    rows = [
        f"| `{name}` | {_served(GPTQ, name)} | {_served(AWQ, name)} |"
        for name in sorted({*GPTQ.values, *AWQ.values})
    ]
    rules, same, parts, words = (
        ", ".join(f"`{name}`" for name in names)
        for names in (GPTQ.rules, OF_RULES, CHANGES, sorted(CHANGING_WORDS))
    )
    what = f"rules that leave modules out, or give {same} that all have"
    rows.append(f"| {rules} | {what} | the same |")
    rows.append(
        f"| names with {parts} in them, in any spelling and at any depth | off or empty | off or empty |"
    )
    rows.append(f"| names with one of the words {words} | off or empty | off or empty |")
    rows.append("| any other | neutral | neutral |")
    return "\n".join(("| setting | GPTQ | AWQ |", "|---|---|---|", *rows))


def test_the_table_is_the_one_of_the_code() -> None:
    assert GPTQ.rules == AWQ.rules
    assert table() in read("docs/models.md")
