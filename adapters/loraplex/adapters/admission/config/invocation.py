"""The invocation of an activated LoRA (aLoRA): PEFT's alora_invocation_tokens.

Such an adapter acts from the first token of the last occurrence of its invocation in the prompt on, that token
included. All positions before are the base's, so their KV is the base's too. (Greenewald et al., "Activated LoRA",
arXiv:2504.12397; PEFT: `tuners/lora/variants.py`.)
"""

from __future__ import annotations

from typing import Any

from loraplex.adapters.admission.faults import invalid, unsupported
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.files import shown
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

MAX_INVOCATION_TOKENS = 64
_FIELD = "alora_invocation_tokens"


def parse_invocation(value: Any) -> tuple[int, ...]:
    """The token ids; empty for an adapter that acts on every position. Raises AdapterRefused (config_invalid)."""
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INVOCATION_TOKENS:
        invalid(
            f"{_FIELD} must be null or a list of 1 to {MAX_INVOCATION_TOKENS} token ids; with an empty list PEFT never "
            "applies the adapter"
        )
    for token in value:
        if type(token) is not int or token < 0:
            invalid(f"{_FIELD} must name token ids, not {shown(token)}")
    return tuple(value)


def check_invocation(
    invocation: tuple[int, ...], base: BaseSpec, *, use_dora: bool, changes_embedding: bool
) -> None:
    """Check an invocation against the base and the rest of the adapter. Raises AdapterRefused."""
    if not invocation:
        return
    if use_dora:
        unsupported(
            _FIELD,
            f"{_FIELD} and use_dora are both set: PEFT has no such variant and refuses to load it; train without one "
            "of the two",
        )
    if changes_embedding:
        unsupported(
            _FIELD,
            f"{_FIELD} is set, and the adapter changes the embedding, which acts on every position; PEFT activates "
            "linears alone. Train without embed_tokens as a target and without trainable_token_indices",
        )
    embedding, head = (base.sites.get((0, site)) for site in (EMBEDDING, HEAD))
    vocab_size = None if head is None else head.out_features
    if embedding is not None:
        vocab_size = embedding.in_features
    if vocab_size is not None and max(invocation) >= vocab_size:
        raise AdapterRefused(
            "base_mismatch",
            f"adapter_config.json: {_FIELD} names token {max(invocation)}, but the base has {vocab_size} tokens: its "
            "vocabulary was enlarged for the training, or the ids are of another tokenizer",
        )
