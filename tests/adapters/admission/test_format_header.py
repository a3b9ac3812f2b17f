"""The safetensors header: what the format allows is read, all else is refused at bounded cost."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loraplex.adapters.admission.safetensors_header import ADAPTER_LIMITS, HeaderLimits, read_header
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.tensors import read_tensor
from support.adapters.drafts import attempt, encode_safetensors, frame_header


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path, content: bytes) -> AdapterRefused:
    path.write_bytes(content)
    with pytest.raises(AdapterRefused) as caught:
        read_header(path)
    return caught.value


def test_reads_what_the_official_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((7,)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read_tensor(path, header[name]), tensor.astype(np.float32))


def test_bfloat16_reads_exactly(tmp_path: Path) -> None:
    bits = np.arange(0, 0x7F80, 17, dtype=np.uint16)
    header = {"x": entry("BF16", [len(bits)], [0, 2 * len(bits)])}
    path = tmp_path / "x.safetensors"
    path.write_bytes(frame_header(json.dumps(header).encode()) + bits.tobytes())
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(read_tensor(path, read_header(path)["x"]), expected)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"\x01\0\0", "shorter than"),
        (struct.pack("<Q", 2**63) + b"{}", "claims"),
        (struct.pack("<Q", 100) + b"{}", "claims"),
        (frame_header(b""), "nothing but zeros"),
        (frame_header(b"  {}"), "begin with"),
        (frame_header(b"[]"), "begin with"),
        (frame_header(b"{"), "not valid JSON"),
        (frame_header(b'{"\xff": 1}'), "not valid JSON"),
        (frame_header(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "deep"),
        (frame_header(b'{"a": ' + b'{"b":' * 100_000 + b"1" + b"}" * 100_001), "deep"),
        (frame_header(b'{"a": NaN}'), "NaN"),
        (frame_header(b'{"a": ' + b"9" * 5000 + b"}"), "too large"),
        (frame_header(b'{"__metadata__": {"a": 1}}'), "__metadata__"),
        (frame_header(b'{"__metadata__": []}'), "__metadata__"),
        (frame_header(b"{}") + b"x", "follow"),
    ],
)
def test_refuses_what_is_no_header(tmp_path: Path, content: bytes, says: str) -> None:
    refusal = refused(tmp_path / "x", content)
    assert refusal.code == "not_safetensors"
    assert says in refusal.message


@pytest.mark.parametrize(
    ("tensors", "data", "says"),
    [
        ({"a": entry(offsets=[0, 4]), "b": entry(offsets=[2, 6])}, 6, "overlaps"),
        ({"a": entry(offsets=[0, 4]), "b": entry(offsets=[0, 4])}, 4, "overlaps"),
        ({"a": entry(offsets=[0, 4]), "b": entry(offsets=[8, 12])}, 12, "hole"),
        ({"a": entry(offsets=[4, 8])}, 8, "hole"),
        ({"a": entry(offsets=[0, 4])}, 3, "truncated"),
        ({"a": entry(offsets=[0, 4])}, 5, "follow"),
        ({"a": entry(shape=[2], offsets=[0, 4])}, 4, "do not span"),
        ({"a": entry(offsets=[4, 0])}, 4, "do not span"),
        ({"a": entry(shape=[2**31, 2**31, 2**31], offsets=[0, 4])}, 4, "do not span"),
        ({"a": entry(shape=[-1], offsets=[0, 4])}, 4, "bad shape"),
        ({"a": entry(shape=[1.0], offsets=[0, 4])}, 4, "bad shape"),
        ({"a": entry(shape=[True], offsets=[0, 4])}, 4, "bad shape"),
        ({"a": entry(shape=[1] * 9)}, 4, "bad shape"),
        ({"a": entry(shape=1)}, 4, "bad shape"),
        ({"a": entry(offsets=[0, "4"])}, 4, "data_offsets"),
        ({"a": entry(offsets=[0, 4, 8])}, 4, "data_offsets"),
        ({"a": entry(offsets=[-4, 0])}, 4, "data_offsets"),
        ({"a": entry("F33")}, 4, "dtype"),
        ({"a": entry(["F32"])}, 4, "dtype"),
        ({"a": entry() | {"extra": 1}}, 4, "exactly"),
        ({"a": {"dtype": "F32"}}, 4, "exactly"),
        ({"a": []}, 4, "exactly"),
        ({"": entry()}, 4, "names"),
        ({"n" * 600: entry()}, 4, "names"),
    ],
)
def test_refuses_inconsistent_tensors(tmp_path: Path, tensors: dict[str, Any], data: int, says: str) -> None:
    refusal = refused(tmp_path / "x", frame_header(json.dumps(tensors).encode()) + bytes(data))
    assert refusal.code == "not_safetensors"
    assert says in refusal.message


def test_refuses_a_name_that_comes_twice(tmp_path: Path) -> None:
    one = json.dumps(entry())
    refusal = refused(tmp_path / "x", frame_header(f'{{"a": {one}, "a": {one}}}'.encode()) + bytes(4))
    assert "twice" in refusal.message


def test_caps_header_bytes_and_tensor_count(tmp_path: Path) -> None:
    big = refused(tmp_path / "x", frame_header(b"{" + b" " * ADAPTER_LIMITS.max_bytes + b"}"))
    assert big.code == "too_large"
    path = tmp_path / "y"
    path.write_bytes(encode_safetensors({f"t{i}": np.zeros(1, np.float32) for i in range(9)}))
    assert len(read_header(path, HeaderLimits(1 << 20, 9))) == 9
    with pytest.raises(AdapterRefused) as caught:
        read_header(path, HeaderLimits(1 << 20, 8))
    assert caught.value.code == "too_large"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(encode_safetensors({"t": np.zeros(1, np.float32)}))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic"):
        read_header(tmp_path / "link")


SMALL = encode_safetensors(
    {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, metadata={"format": "pt"}
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_changed_bytes_are_refused_or_read_alike(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if action == "flip":
            content[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del content[at : at + data.draw(st.integers(1, 8))]
        else:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        if not content:
            break
    path = tmp_path / "x"
    path.write_bytes(content)
    outcome = attempt(read_header, path)
    if isinstance(outcome, AdapterRefused):
        assert outcome.code in ("not_safetensors", "too_large")
        assert outcome.message.isascii()
        return
    # What is accepted, the official reader accepts too, with the same shapes.
    official = load_file(path)
    assert {name: slice_.shape for name, slice_ in outcome.items()} == {
        n: t.shape for n, t in official.items()
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=4),
        json_values
        | st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}),
        max_size=4,
    )
)
def test_fuzz_any_json_is_refused_or_consistent(tmp_path: Path, header: dict[str, Any]) -> None:
    path = tmp_path / "x"
    path.write_bytes(frame_header(json.dumps(header).encode()) + bytes(16))
    outcome = attempt(read_header, path)
    if isinstance(outcome, AdapterRefused):
        assert outcome.code in ("not_safetensors", "too_large")
    else:
        assert sum(tensor.end - tensor.start for tensor in outcome.values()) == 16
