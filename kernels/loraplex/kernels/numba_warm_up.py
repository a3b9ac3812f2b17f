"""Reads the code that numba compiled before from the disk, and compiles the rest, before the first step: the one
takes a second or two, the other most of a minute, and neither is for a request to wait for."""

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.attention.kv_codes import head_width
from loraplex.kernels.attention.numba_attention import build_attention_batch, paged_attention
from loraplex.kernels.attention.numba_attention_products import BLOCK
from loraplex.kernels.experts import numba_expert_lora
from loraplex.kernels.experts.types import ExpertActivation, ExpertOps, RouterKind
from loraplex.kernels.linear import numba_dense, numba_dense_tiles
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.lora import numba_lora
from loraplex.kernels.numba_runtime.thread_team import run_calls
from loraplex.kernels.numba_runtime.vectors import LIKE
from loraplex.kernels.ops import Ops
from loraplex.kernels.recurrent import COLUMNS
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)
from loraplex.kernels.sampling.numba_argmax import largest
from loraplex.kernels.sampling.numba_logsumexp import log_sum_exp
from loraplex.kernels.sampling.numba_sampling import draw
from loraplex.kernels.sampling.types import Option, Options, TokenMasks
from loraplex.kernels.weight_form import WeightForm


def warm_up(
    dtype: torch.dtype,
    ops: Ops,
    *,
    codes: bool = False,
    kv_codes: bool = False,
    recurrent: bool = False,
    experts: bool = False,
) -> None:
    """Compile all kernels for a model in `dtype`; `codes`: those of linears in groups too; `kv_codes`: for a KV cache
    of codes; `recurrent`: for layers with a state; `experts`: for mixtures of experts. `ops` are numba's. Kernels do
    not depend on sizes. For the thread that will run the steps."""
    if dtype not in LIKE:
        return
    x = torch.zeros(1, 64, dtype=dtype)
    for weight in (torch.ones(64, dtype=dtype), torch.ones(64)):
        ops.rms_norm(x, weight, 1e-5)
        ops.add_rms_norm(x, x.clone(), weight, 1e-5)
    ops.act_and_mul(x, False)
    ops.to_float32(x)
    batch = build_attention_batch([1], [1], [[0]])
    cache_dtype = torch.int8 if kv_codes else dtype
    cache = torch.zeros(1, BLOCK, 2, 1, head_width(2, cache_dtype), dtype=cache_dtype)
    heads = x[:, :6].view(1, 3, 2)
    for norm in (None, torch.ones(2, dtype=dtype), torch.ones(2)):
        cos = torch.ones(1, 1, 1)
        ops.rotate_and_write(heads, 1, cos, cos, cache, batch, q_norm=norm, k_norm=norm, eps=1e-5)
    paged_attention(heads[:, :1], cache, batch, scale=1.0, window=None, softcap=None)
    run_calls(0, 0, 0)
    for inputs in (2, numba_dense_tiles.INPUTS):  # of the second number tiles are used, where there are some
        row = torch.zeros(1, inputs, dtype=dtype)
        numba_dense.pack_weight(row, batch_invariant=True)(row)
    if codes:
        _warm_up_codes(dtype, ops)
    if recurrent:
        _warm_up_recurrent(dtype, ops.recurrent)
    if experts:
        _warm_up_experts(dtype, ops.experts)
        row = torch.zeros(1, 2)  # some routers are in float32
        numba_dense.pack_weight(row, batch_invariant=True)(row)
        numba_lora.warm_up(dtype, torch.float32)
        numba_expert_lora.warm_up(dtype, dtype)
    numba_lora.warm_up(dtype, dtype)
    logits = torch.zeros(1, 1)
    log_sum_exp(logits)
    first = torch.zeros(1, dtype=torch.int64)
    largest(logits, TokenMasks(first, first, torch.ones(1, 1, dtype=torch.int32)))
    host = np.full((1, len(Option)), 0.5)
    draw(logits, *largest(logits), Options(host, torch.from_numpy(host)))


def _warm_up_recurrent(dtype: torch.dtype, ops: RecurrentOps) -> None:
    heads = RecurrentHeads(1, 1, 16, COLUMNS)
    storage = [torch.zeros(1, size, dtype=torch.uint8) for size in recurrent_bytes(heads, dtype)]
    memory = recurrent_memory(heads, dtype, *storage)
    rows = lay_out_units([RecurrentUnit((0,), 0, 0, 0, ())])
    x, ones = torch.zeros(1, heads.channels, dtype=dtype), torch.ones(1)
    beta, decay = ops.delta_gates(x[:, :1], x[:, :1], ones, ones)
    qkv = ops.convolve(x, torch.zeros(heads.width, heads.channels), rows, memory)
    out = ops.rule(qkv, decay, beta, rows, memory, heads)
    ops.step_gates(x[:, :1], ones, ones, 0.0, 1.0)
    ops.gated_norm(out, out, torch.ones(COLUMNS, dtype=dtype), 1e-6)
    ops.output_gate(out[:, None], out[:, None])
    ops.by_part(x, 1, (x.shape[1],))


def _warm_up_experts(dtype: torch.dtype, ops: ExpertOps) -> None:
    """All but their linears, which have the kernels of any linear."""
    x = torch.zeros(1, 2, dtype=dtype)
    for logits in (x, x.float()):
        routes = ops.route(logits, RouterKind("softmax", 2, 1))
    rows = ops.group(routes, 2)
    ops.keep_starts(rows, torch.empty(3, dtype=torch.int64))
    ops.act(x, ExpertActivation("clamped"))
    ops.add_gated(ops.combine(ops.gather(x, rows), routes, rows), x, x[:, :1])


def _warm_up_codes(dtype: torch.dtype, ops: Ops) -> None:
    exact, rounded = WeightForm("groups", 8), WeightForm("groups", 8, activations="int8")
    for offsets in (None, torch.zeros(1, 1)):
        weight = GroupedWeight(torch.zeros(1, 2, dtype=torch.int8), torch.zeros(1, 1), offsets, 2)
        for rows in (1, 64):  # of many rows other kernels are used
            ops.pack(weight, exact, dtype)(torch.zeros(rows, 2, dtype=dtype))
    codes = torch.zeros(1, 32, dtype=torch.int8)
    for most in (0, 127):  # codes of 4 bits, and of 8
        codes[0, 0] = most
        for scale in (1.0, 1.0 + 2**-20):  # in float16, and one that float16 does not hold
            weight = GroupedWeight(codes, torch.full((1, 1), scale), None, 32)
            ops.pack(weight, rounded, dtype)(torch.zeros(1, 32, dtype=dtype))
