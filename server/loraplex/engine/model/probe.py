"""The comparison that an untested architecture must pass before it is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.layers import keeping_all
from loraplex.engine.model.base import ForwardBatch, ModelUnsupported
from loraplex.engine.model.wrapped import ATTENTION_NAME, TransformersDecoder
from loraplex.kernels.attention import BLOCK_SIZE

_LENGTHS = (37, 21)
"""Two sequences, several blocks each, in one flat batch: a model that mixes neighbouring rows by anything else than
attention (convolutions, recurrent states) shows."""
_NARROW_WINDOW = 7
"""Sliding windows and attention chunks are set to this for the comparison, so that they matter within its length."""
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest error that passes, relative to the spread of the logits. Rounding stays well below it; another formula
does not."""


class _CountingPass:
    """Stands for adapters and notes where they would have been added, and to how many rows."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, str], list[int]] = {}

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls.setdefault((layer, group), []).append(x.shape[0])


@torch.inference_mode()
def probe(decoder: TransformersDecoder) -> None:
    """Compare the decoder with the model's own eager attention: whole prompts, prompts in chunks, and decoding out of
    the paged cache, two sequences in one batch. Raises ModelUnsupported where they differ, or where an adapter's
    linear is not run exactly once on every row."""
    model = decoder.eager_model
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, decoder.shape.vocab_size, (length,), generator=generator).tolist()
        for length in _LENGTHS
    ]
    try:
        with _narrowed(model):
            expected = [_eager_logits(decoder, prompt) for prompt in prompts]
            for cuts in ((), (1, 18), (5, 6, 7, 16, 20)):
                _compare(_paged_logits(decoder, prompts, cuts), expected, decoder.dtype)
    except ModelUnsupported as error:
        raise ModelUnsupported(_refusal(model, error.message)) from error
    except Exception as error:
        raise ModelUnsupported(_refusal(model, f"it fails: {type(error).__name__}: {error}")) from error


def _refusal(model: Any, reason: str) -> str:
    return (
        f"{type(model).__name__} is not on the list of tested architectures, and its comparison with transformers "
        f"did not pass: {reason}"
    )


def _eager_logits(decoder: TransformersDecoder, prompt: list[int]) -> torch.Tensor:
    """[L, V] float32 by transformers alone."""
    model = decoder.eager_model
    if not decoder.has_own_attention:
        model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt], device=decoder.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        if not decoder.has_own_attention:
            model.set_attn_implementation(ATTENTION_NAME)
    return logits


def _paged_logits(
    decoder: TransformersDecoder, prompts: list[list[int]], cuts: tuple[int, ...]
) -> list[torch.Tensor]:
    """[L, V] a prompt, computed in slices that end at `cuts`; the last five positions are decoded one by one."""
    device = decoder.device
    tables = [_table(index, len(prompt)) for index, prompt in enumerate(prompts)]
    # What an earlier owner may have left in the blocks.
    kv = KVCache(
        keeping_all(decoder.shape.caches), sum(len(table) for table in tables), decoder.dtype, device
    )
    kv.tensor.fill_(float("nan"))
    ends: list[list[int]] = [
        sorted({c for c in cuts if c < len(p) - 5} | set(range(len(p) - 5, len(p) + 1))) if cuts else [len(p)]
        for p in prompts
    ]
    done = [0] * len(prompts)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(ends):
        turn = [i for i in range(len(prompts)) if ends[i]]
        spans = [(done[i], ends[i].pop(0)) for i in turn]
        fresh = [
            tables[i][p // BLOCK_SIZE]
            for i, span in zip(turn, spans, strict=True)
            for p in range(*span)
            if p % BLOCK_SIZE == 0
        ]
        counting = _CountingPass()
        num_rows = sum(end - start for start, end in spans)
        batch = ForwardBatch(
            token_ids=torch.tensor(
                [t for i, (a, b) in zip(turn, spans, strict=True) for t in prompts[i][a:b]], device=device
            ),
            positions=torch.tensor([p for span in spans for p in range(*span)], device=device),
            attention=(
                decoder.attention.lay_out(
                    [end - start for start, end in spans],
                    [end for _, end in spans],
                    [tables[i] for i in turn],
                ),
            ),
            fresh_blocks=torch.tensor(fresh, dtype=torch.int64, device=device),
            logits_rows=torch.arange(num_rows, device=device),
            kv=kv,
            lora=counting,
        )
        logits = decoder.forward(batch)
        for layer in range(decoder.num_layers):
            if not kv.layer(layer).isfinite().any():
                raise ModelUnsupported(
                    f"layer {layer} has an attention of its own, which our paged cache can't serve"
                )
        _check_sites(decoder, counting, num_rows)
        first = 0
        for i, (start, end) in zip(turn, spans, strict=True):
            pieces[i].append(logits[first : first + end - start])
            first += end - start
            done[i] = end
    return [torch.cat(parts) for parts in pieces]


def _table(index: int, length: int) -> list[int]:
    """Blocks in an order that is not the positions' own."""
    first = sum(-(-earlier // BLOCK_SIZE) for earlier in _LENGTHS[:index])
    return list(range(first, first + -(-length // BLOCK_SIZE)))[::-1]


def _check_sites(decoder: TransformersDecoder, counting: _CountingPass, num_rows: int) -> None:
    for group in decoder.site_groups:
        for layer in group.layers_of(decoder.num_layers):
            if counting.calls.get((layer, group.key)) != [num_rows]:
                raise ModelUnsupported(
                    f"{group.sites[0]} of layer {layer} is not run once on every row, so that adapters could not be "
                    "applied"
                )


def _compare(paged: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for ours, theirs in zip(paged, expected, strict=True):
        spread = float(theirs.std()) or 1.0
        error = float((ours - theirs).abs().max()) / spread
        if not error <= _TOLERANCE[dtype]:
            raise ModelUnsupported(
                f"logits differ by {error:.2g} of their spread, where {_TOLERANCE[dtype]:.0e} is allowed"
            )


@contextmanager
def _narrowed(model: Any) -> Iterator[None]:
    """Make every window and chunk of attention small. Masks are made from the config, our attention gets them by the
    modules: both are changed, and a model whose two disagree is found out."""
    places = [model.config, *model.modules()]
    places += [
        config for config in {id(c): c for c in _configs(model)}.values() if config is not model.config
    ]
    changed: list[tuple[Any, str, int]] = []
    try:
        for place in places:
            for name in _WINDOW_FIELDS:
                value = getattr(place, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    changed.append((place, name, value))
                    setattr(place, name, _NARROW_WINDOW)
        yield
    finally:
        for place, name, value in reversed(changed):
            setattr(place, name, value)


def _configs(model: Any) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]
