"""The text that is measured: always the same, so that figures of adapters and of servers can be compared."""

from __future__ import annotations

from collections.abc import Callable

MOST_TOKENS = 256
"""The most tokens of all prompts together."""

PROMPTS = {
    "chat": (
        "User: My train was cancelled and I have to be in Hamburg by nine tomorrow. What can I do?\n"
        "Assistant: First look whether the railway has put you on another train; most let you take the next one "
        "with the same ticket. If that is too late, compare night buses and car pools, and ask for your money back."
    ),
    "code": (
        "def moving_average(values: list[float], width: int) -> list[float]:\n"
        '    """The mean of each run of `width` values."""\n'
        "    if width < 1:\n"
        '        raise ValueError(f"width is {width}, not positive")\n'
        "    total = sum(values[:width])\n"
        "    means = [total / width]\n"
    ),
    "json": (
        '{"order": {"id": 48213, "customer": {"name": "Ines Duarte", "city": "Porto"}, "paid": true, "items": '
        '[{"sku": "TEA-250", "count": 2, "price": 7.5}, {"sku": "CUP-01", "count": 1, "price": 12.0}], "note": null}}'
    ),
    "prose": (
        "The lighthouse had been dark for eleven winters when the new keeper came up the path with a lamp in one hand "
        "and a letter in the other. Nobody in the village could say who had sent her, and she did not tell them. She "
        "swept the stairs, cleaned the glass, and on the third evening the light went out over the water again."
    ),
}


def prompt_tokens(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The prompts as the served tokenizer gives them, as much of each as fits its part of MOST_TOKENS."""
    return [encode(text)[: MOST_TOKENS // len(PROMPTS)] for text in PROMPTS.values()]
