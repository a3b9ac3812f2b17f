"""How Triton's kernels are tested without a GPU: interpreted in this process, compiled ahead of time in another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from support.kernels import triton_compile
from support.kernels.triton_aot import Variant, check, compile_variants
from support.kernels.triton_interpreter import repair_bfloat16
from support.kernels.triton_sample import product, rounded, row_sums

SAMPLE = "support.kernels.triton_sample:"
SUMS = Variant(
    "row sums",
    SAMPLE + "row_sums",
    {"x_ptr": "*bf16", "y_ptr": "*fp32", "num_columns": "i32"},
    {"BLOCK": 128},
)
PRODUCT = Variant(
    "product",
    SAMPLE + "product",
    dict.fromkeys(("x_ptr", "y_ptr"), "*fp16") | {"z_ptr": "*fp32"},
    {"SIZE": 16},
)
FAT = Variant(
    "too much for a warp",
    SAMPLE + "centred",
    {"x_ptr": "*fp32", "y_ptr": "*fp32"},
    {"SIZE": 16384},
    num_warps=1,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_kernels_are_interpreted_where_there_is_no_gpu() -> None:
    x, y = torch.randn(3, 300), torch.full((3,), float("nan"))
    row_sums[(3,)](x, y, 300, BLOCK=128)
    torch.testing.assert_close(y, x.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_interpreter_computes_in_bfloat16_once_it_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, 16, generator=made) for _ in range(2))
    short_x, short_y, z = x.bfloat16(), torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)

    def is_right() -> tuple[bool, bool]:
        product[(1,)](short_x, short_x, z, SIZE=16)
        rounded[(1,)](y, short_y, SIZE=256)
        return torch.allclose(z, short_x.float() @ short_x.float(), atol=1e-5), torch.equal(
            short_y, y.bfloat16()
        )

    assert is_right() == (False, False), "the interpreter has been repaired: repair_bfloat16 can go"
    repair_bfloat16(monkeypatch)
    assert is_right() == (True, True)


@pytest.mark.slow
def test_resource_usage_is_read_from_the_compiler_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, kernels = tmp_path / "record.json", [SUMS, PRODUCT, FAT]
    monkeypatch.setenv("RECORD_AOT", "1")
    report = check(kernels, record)
    monkeypatch.delenv("RECORD_AOT")
    for arch in ("sm_80", "sm_90"):
        assert report["row sums"][arch].registers > 8
        assert report["row sums"][arch].spill_bytes == report["row sums"][arch].tensor_cores == 0
        assert report["product"][arch].tensor_cores > 0
        assert report["too much for a warp"][arch].wide_loads > 0
        assert report["too much for a warp"][arch].spill_bytes > 0
    recorded = json.loads(record.read_text())
    recorded["kernels"]["too much for a warp"]["sm_80"]["spill_bytes"] = 0
    recorded["kernels"]["row sums"]["sm_90"]["registers"] = 4
    recorded["kernels"]["product"]["sm_80"]["tensor_cores"] = 0
    record.write_text(json.dumps(recorded))
    with pytest.raises(AssertionError) as refused:
        check(kernels, record)
    assert [line.split(":")[0] for line in str(refused.value).splitlines() if " on sm_" in line] == [
        "row sums on sm_90",
        "product on sm_80",
        "too much for a warp on sm_80",
    ]


def test_a_variant_must_name_every_parameter() -> None:
    bad = Variant("bad", SUMS.kernel, {"x_ptr": "*bf16", "y_ptr": "*fp32"}, {"BLOCK": 128})
    with pytest.raises(AssertionError, match="num_columns"):
        compile_variants([bad], [80])


def test_what_is_kept_is_read_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, job = tmp_path / "compiled.json", (asdict(SUMS) | {"kernel": "loraplex.kernels.a:b"}, 80)
    kept.write_text("{}")
    compiled = iter([{"loads": 1}, {"loads": 2}])
    source = tmp_path / "a.py"
    source.write_text("one = 1")
    monkeypatch.setattr(triton_compile, "KEPT", kept)
    monkeypatch.setattr(triton_compile, "imported_sources", lambda module: {source})
    monkeypatch.setattr(triton_compile, "_compile_apart", lambda jobs: [next(compiled)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    monkeypatch.setenv("KEEP_AOT", "1")
    triton_compile.sources_digest.cache_clear()
    try:
        (found,) = triton_compile.compile_or_read([job])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        monkeypatch.delenv("KEEP_AOT")
        assert triton_compile.compile_or_read([job]) == [found]
        source.write_text("one = 2")
        triton_compile.sources_digest.cache_clear()
        (changed,) = triton_compile.compile_or_read([job])
        assert (found["loads"], changed["loads"]) == (1, 2)
        assert list(json.loads(kept.read_text()).values()) == [found]
    finally:
        triton_compile.sources_digest.cache_clear()


def test_sources_are_all_that_a_kernel_is_made_of() -> None:
    found = triton_compile.imported_sources("loraplex.kernels.lora.triton_expand")
    names = {path.relative_to(Path(triton_compile.kernels.__path__[0])).as_posix() for path in found}
    assert names >= {
        "lora/triton_expand.py",
        "lora/triton_fields.py",  # through lora/triton_device.py
        "lora/types.py",
    }
    assert "numba_warm_up.py" not in names
