"""Tokens guessed without a model: what followed a sequence's newest tokens where they occurred before.

A sequence repeats itself (quotes, forms, edits), and the answers of one adapter version repeat each other. The longest
suffix of 2 … 8 tokens is searched in the sequence's own prompt and output (`own_index`), and in finished answers of its
namespace, (tenant, adapter digest or base) (`answer_history`). `acceptance` estimates what a draft is worth, and
`drafter.Drafter` chooses. Nothing of another namespace is read.

Both indexes name places by the two tokens before them, and a candidate is compared backwards from there. So one entry
a token finds matches of all lengths, and a hash collision costs one comparison. The work of every call is bounded,
whatever the tokens are.

Prompt lookup: Saxena, "Prompt Lookup Decoding" (2023). Finished answers: Oliaro et al., "SuffixDecoding" (2024). Chains
of places: RFC 1951, section 4.
"""

from loraplex.engine.scheduling.drafting.drafter import MAX_DRAFT, Draft, Drafter, DraftSource

__all__ = ["MAX_DRAFT", "Draft", "DraftSource", "Drafter"]
