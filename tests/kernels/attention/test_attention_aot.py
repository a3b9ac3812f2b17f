"""The Triton kernels of attention and of what is fused around it, compiled for GPUs that are not there.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/attention/test_attention_aot.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, choose_tilings
from support.kernels import triton_compile
from support.kernels.triton_aot import ARCHS, Variant, check, compile_variants, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "attention.json"
PROGRAMS = "loraplex.kernels.attention.triton_programs"
STRIDES = ("q_row", "q_head", "cache_block", "cache_position", "cache_kind", "cache_head", "scales_kind")


def attention(
    name: str,
    shape: AttentionShape,
    tiling: Tiling,
    *,
    prefill: bool,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    codes: bool = False,
) -> Variant:
    dim = shape.head_dim
    return Variant(
        name,
        f"{PROGRAMS}:attention_program",
        dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16")
        | ({"cache_ptr": "*i8", "scales_ptr": "*fp16"} if codes else {"scales_ptr": "*bf16"})
        | dict.fromkeys(("part_ptr", "lse_ptr", "sinks_ptr"), "*fp32")
        | dict.fromkeys(("items_ptr", "count_ptr", "tables_ptr"), "*i32")
        | dict.fromkeys((*STRIDES, "window"), "i32")
        | dict.fromkeys(("scale", "softcap"), "fp32"),
        {
            "NUM_HEADS": shape.num_heads, "GROUP": shape.group, "TILE_HEADS": shape.heads_per_tile,
            "PARTS": shape.parts_per_group, "UNITS": shape.units, "HEAD_DIM": dim,
            "BLOCK_D": 1 << (dim - 1).bit_length(), "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n,
            "BLOCK_SIZE": shape.block_size, "HAS_WINDOW": window, "HAS_SOFTCAP": softcap, "HAS_SINKS": sinks,
            "INTERIOR": prefill, "CODES": codes, "PRECISION": "tf32",
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        unaligned=("count_ptr",),
        multiples_of_16=STRIDES,
    )  # fmt: skip


def fused() -> list[Variant]:
    strides = (
        "heads_row",
        "heads_head",
        "cache_block",
        "cache_position",
        "cache_kind",
        "cache_head",
        "scales_kind",
    )
    pointers = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i32"}
    names = ("heads_ptr", "cache_ptr", "scales_ptr", "q_norm_ptr", "k_norm_ptr", "v_norm_ptr")
    pointers |= dict.fromkeys(names, "*bf16")
    numbers = dict.fromkeys(("eps", "q_factor", "k_factor"), "fp32")
    rope = Variant(
        "rope and KV write, Qwen3's norm",
        "loraplex.kernels.layers.triton_rope:rope_program",
        pointers | dict.fromkeys(strides, "i32") | numbers,
        {
            "NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "BLOCK_HALF": 64, "BLOCK_REST": 1,
            "BLOCK_HEADS": 8, "BLOCK_SIZE": 16, "KINDS": 2, "GATES": 0, "NORM": True, "V_NORM": False,
            "CODES": False, "TRANSFORM": False,
        },
        multiples_of_16=strides,
    )  # fmt: skip
    rope_of_codes = replace(
        rope,
        name="rope and KV write as codes, Qwen3's norm",
        signature=rope.signature | {"cache_ptr": "*i8", "scales_ptr": "*fp16"},
        constants={**rope.constants, "CODES": True, "TRANSFORM": True},
    )
    keys_as_values = replace(
        rope,
        name="rope and KV write, Gemma 4's norms, values that are keys",
        signature=rope.signature | dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "v_norm_ptr"), "*fp32"),
        constants={
            **rope.constants, "NUM_HEADS": 32, "NUM_KV_HEADS": 4, "HEAD_DIM": 512, "HALF": 256, "BLOCK_HALF": 256,
            "KINDS": 1, "V_NORM": True,
        },
    )  # fmt: skip
    behind_queries = replace(
        keys_as_values,
        name="rope and KV write, Qwen3.5's gates behind queries",
        constants={
            **rope.constants, "NUM_KV_HEADS": 4, "HEAD_DIM": 256, "HALF": 32, "BLOCK_HALF": 32, "BLOCK_REST": 256,
            "GATES": 16,
        },
    )  # fmt: skip
    partial_rope_of_codes = replace(
        rope_of_codes,
        name="rope of 96 of 128 numbers and KV write as codes",
        constants={**rope_of_codes.constants, "HALF": 48, "BLOCK_REST": 32, "NORM": False},
    )
    norm = Variant(
        "residual and norm, 4096",
        "loraplex.kernels.layers.triton_norm:rms_norm_program",
        dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr", "weight_ptr"), "*bf16")
        | dict.fromkeys(("inner", "x_outer", "x_inner", "residual_row"), "i32")
        | {"eps": "fp32", "scale": "fp32"},
        {"COLUMNS": 4096, "WEIGHT_ROW": 0, "BLOCK": 4096, "ADD": True, "SCALE": False},
        num_warps=8,
        multiples_of_16=("x_outer", "x_inner", "residual_row"),
    )
    gated = Variant(
        "gelu and mul",
        "loraplex.kernels.layers.triton_activation:gated_program",
        {"gate_ptr": "*bf16", "up_ptr": "*bf16", "out_ptr": "*bf16", "gate_row": "i32", "up_row": "i32"},
        {"INNER": 14336, "BLOCK": 1024, "GELU": True},
        multiples_of_16=("gate_row", "up_row"),
    )
    merge = Variant(
        "merge, 128",
        f"{PROGRAMS}:merge_program",
        dict.fromkeys(("part_ptr", "lse_ptr", "sinks_ptr"), "*fp32")
        | {"out_ptr": "*bf16", "entries_ptr": "*i32", "count_ptr": "*i32"},
        {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_D": 128, "HAS_SINKS": False, "BLOCK_PARTS": 16},
        unaligned=("count_ptr",),
    )
    merge_with_sinks = replace(
        merge,
        name="merge, 64, with sinks",
        constants={**merge.constants, "NUM_HEADS": 64, "HEAD_DIM": 64, "BLOCK_D": 64, "HAS_SINKS": True},
    )
    return [
        rope,
        rope_of_codes,
        keys_as_values,
        behind_queries,
        partial_rope_of_codes,
        norm,
        gated,
        merge,
        merge_with_sinks,
    ]


def variants() -> list[Variant]:
    found = []
    for name, heads, kv_heads, head_dim, window, softcap, sinks in (
        ("Llama 8B", 32, 8, 128, False, False, False),
        ("Qwen2 0.5B", 14, 2, 64, False, False, False),
        ("Gemma 2 2B", 8, 4, 256, True, True, False),
        ("Gemma 4 31B, layers that see all,", 32, 4, 512, False, False, False),
        ("gpt-oss", 64, 8, 64, True, False, True),
    ):
        shape = AttentionShape(heads, kv_heads, head_dim, 16)
        of = {"window": window, "softcap": softcap, "sinks": sinks}
        for arch in ARCHS:
            tilings = choose_tilings(shape, 2, (arch // 10, arch % 10))
            decode = attention(f"{name} decode, sm_{arch}", shape, tilings.decode, prefill=False, **of)
            prefill = attention(f"{name} prefill, sm_{arch}", shape, tilings.prefill, prefill=True, **of)
            found += [replace(variant, archs=(arch,)) for variant in (decode, prefill)]
            if name.startswith("Llama"):
                found += [
                    replace(
                        attention(
                            f"{name} {step} of codes, sm_{arch}",
                            shape,
                            tiling,
                            prefill=is_prefill,
                            codes=True,
                        ),
                        archs=(arch,),
                    )
                    for step, tiling, is_prefill in (
                        ("decode", tilings.decode, False),
                        ("prefill", tilings.prefill, True),
                    )
                ]
        # The same on both.
        tiling = choose_tilings(shape, 2, (8, 0), batch_invariant=True).decode
        found.append(
            attention(f"{name} decode and prefill, batch-invariant", shape, tiling, prefill=False, **of)
        )
    return found + fused()


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(every: bool) -> None:
    """The short version without Qwen2, whose heads are narrower than Llama's, and with Gemma's on Hopper alone."""
    left_out = () if every else ("Qwen2", "Gemma 2 2B decode, sm_80", "Gemma 2 2B prefill, sm_80")
    compiled = [variant for variant in variants() if not any(name in variant.name for name in left_out)]
    report = check(variants(), RECORD, compiled=compiled)
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            multiplies = any(part in name for part in ("prefill", "decode", "as codes"))
            assert bool(usage.tensor_cores) == multiplies


@pytest.mark.slow
def test_on_hopper_no_product_in_registers_is_left_in_flight() -> None:
    hopper = {variant.name: variant for variant in variants() if variant.archs == (90,)}
    prefill = hopper["Llama 8B prefill, sm_90"]
    *prefills, trap, decode = products_in_flight(
        prefill,
        hopper["Gemma 2 2B prefill, sm_90"],
        hopper["Llama 8B prefill of codes, sm_90"],
        replace(prefill, num_stages=2),
        hopper["Llama 8B decode, sm_90"],
    )
    for found, unawaited in prefills:
        assert found > 0
        assert unawaited == 0
    # The trap is there, and this is how it looks.
    assert trap[1] > 0
    # Short tiles may be pipelined: they use another instruction.
    assert decode == (0, 0)


@pytest.mark.slow
def test_what_is_kept_is_what_the_compiler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope, *_ = fused()
    kept = compile_variants([rope], [90])
    (tmp_path / "none.json").write_text("{}")
    monkeypatch.setattr(triton_compile, "KEPT", tmp_path / "none.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_variants([rope], [90]) == kept
