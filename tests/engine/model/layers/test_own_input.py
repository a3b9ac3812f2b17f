"""Inputs of layers' own, made of tokens and embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

from loraplex.engine.model.layer_kinds import InputKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.own_input import InputTables, all_inputs
from loraplex.kernels.lora.site_groups import MODEL_PROJECTION
from loraplex.kernels.torch_backend import torch_ops
from loraplex.kernels.weight_form import FLOATS

ROWS, SIZE, HIDDEN = 64, 128, 4


def test_rows_of_the_table_are_scaled_as_transformers_rounds_the_scale() -> None:
    """In bfloat16, where the root of 128 is no number: of an input that nothing is projected to."""
    torch.manual_seed(0)
    ops, dtype, ids = torch_ops(), torch.bfloat16, torch.arange(ROWS)
    table = (
        Gemma4TextScaledWordEmbedding(ROWS, SIZE, 0, embed_scale=SIZE**0.5).to(dtype).requires_grad_(False)
    )
    projection = Linear(
        ops.pack(torch.zeros(SIZE, HIDDEN, dtype=dtype), FLOATS, dtype), None, 0, MODEL_PROJECTION
    )
    tables = InputTables(table.weight, projection, torch.ones(SIZE, dtype=dtype))
    batch: Any = SimpleNamespace(token_ids=ids, lora=None)
    embeddings = torch.ones(ROWS, HIDDEN, dtype=dtype)
    found = all_inputs(
        InputKind(SIZE, ROWS, "gelu_tanh"), tables, embeddings, batch, AdaptedLinears(ops, 1e-6, {})
    )
    assert torch.equal(found, table(ids) * 2**-0.5)
