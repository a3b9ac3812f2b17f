"""Small damaged GGUF files: refused in one sentence, in little time and memory."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from loraplex.app.base_model.gguf_file import GgufFile, GgufUnsupported
from loraplex.app.base_model.source import ModelUnavailable, ensure_model
from support.models.gguf import MIXES, write_gguf

LIMITED = """
import json, resource, sys
from pathlib import Path
from loraplex.app.base_model.gguf_file import GgufFile, GgufUnsupported
most = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0]) + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
found = {}
for path in map(Path, sys.argv[1:]):
    try:
        GgufFile(path)
        found[path.name] = "read"
    except GgufUnsupported as error:
        found[path.name] = str(error)
print(json.dumps(found))
"""


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def header(fields: bytes = b"", count: int = 1, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + fields


def place(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return header(count=0, tensors=1) + place(name, shape, kind, offset) + bytes(64)


def beside(*offsets: int) -> bytes:
    """Tensors of 64 bytes, a, b, …, that begin at these places of the data."""
    places = [place("abc"[index], (16,), 0, offset) for index, offset in enumerate(offsets)]
    return header(count=0, tensors=len(places)) + b"".join(places) + bytes(512)


KEY = text("k")
DAMAGED = {
    "numbers beyond the end": (header(KEY + array(0, 1 << 60, bytes(100))), "'k' has 1152921504606846976 numbers"),
    "as many numbers as are refused": (header(KEY + array(10, 1 << 20, bytes(100))), "'k' has 8388608 bytes"),
    "texts beyond the end": (header(KEY + array(8, 1 << 40, bytes(100))), "'k' has 1099511627776 texts"),
    "a text beyond the end": (header(KEY + struct.pack("<IQ", 8, 1 << 20)), "'k' has 1048576 bytes"),
    "a text of 2^62 bytes": (header(KEY + struct.pack("<IQ", 8, 1 << 62)), "a text of 4611686018427387904"),
    "a key beyond the end": (header(struct.pack("<Q", 1 << 15) + bytes(9)), "a name has 32768 bytes"),
    "arrays in arrays": (header(KEY + array(9, 1 << 30, bytes(100))), "'k' has the unknown type 9"),
    "an unknown type": (header(KEY + struct.pack("<I", 77) + bytes(8)), "'k' has the unknown type 77"),
    "fields beyond the end": (header(KEY, count=1 << 50), "do not hold 1125899906842624 fields"),
    "tensors beyond the end": (header(count=0, tensors=1 << 50) + bytes(99), "and 1125899906842624 tensors"),
    "a key twice": (header((KEY + struct.pack("<II", 4, 1)) * 2, count=2), "it has 'k' twice"),
    "another version": (header(version=9) + bytes(20), "9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(9), "it is big-endian"),
    "a huge shape": (tensor(shape=(1 << 60, 1 << 60)), "the tensor 'a'"),
    "no dimension": (tensor(shape=()), "a tensor has 0 dimensions"),
    "a size of 0": (tensor(shape=(0, 4)), r"\[0, 4\], which are no blocks"),
    "half a block": (tensor(shape=(33,), kind=8), "no blocks of 32"),
    "an offset beyond the end": (tensor(offset=1 << 62), "ends at byte"),
    "a kind without a name": (tensor(kind=9999), "the unknown type 9999"),
    "a tensor in another's bytes": (beside(0, 32), "the tensor 'b' begins inside 'a'"),
    "tensors in the same bytes": (beside(64, 128, 64), "the tensor 'c' begins inside 'a'"),
    "a name in control characters": (tensor(name="a\x1b[2J\nb", offset=1 << 40), r"the tensor 'a\\x1b\[2J\\nb'"),
}  # fmt: skip


def test_damaged_headers_are_refused_in_little_memory_and_time(tmp_path: Path) -> None:
    for name, (data, _) in DAMAGED.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in DAMAGED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    found = json.loads(done.stdout)
    for name, (_, words) in DAMAGED.items():
        assert re.search(words, found[name]), (name, found[name])
        assert "\n" not in found[name]
        assert "\x1b" not in found[name]


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", kinds=MIXES["Q8_0"]).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in {*range(0, len(whole), 997), len(whole) - 1, len(whole) - 40}:
        path.write_bytes(whole[:length])
        with pytest.raises(GgufUnsupported, match="cut short or broken"):
            GgufFile(path)


@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_K_M"])
def test_it_reads_what_the_packages_reader_reads(kinds: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", kinds=MIXES[kinds], hidden=256, inner=512)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert [each.name for each in ours.tensors] == [each.name for each in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_array_equal(mine.data, other.data)
        assert (mine.tensor_type, mine.data_offset, mine.n_bytes) == (
            other.tensor_type,
            other.data_offset,
            other.n_bytes,
        )


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("llama.attention.head_count", "four", "head_count is 'four', not a number above 0"),
        ("llama.attention.head_count", 0, "head_count is 0, not a number above 0"),
        ("llama.block_count", -3, "block_count is -3, not a number above 0"),
        ("llama.rope.freq_base", float("nan"), "freq_base is NaN, not a finite number"),
        ("tokenizer.ggml.tokens", [1, 2], r"tokens is \[1, 2\], not a list of texts"),
        ("tokenizer.ggml.tokens", "a", "tokens is 'a', not a list of texts"),
        ("tokenizer.ggml.merges", ["a b c"], "damaged, or of a kind that is not known here"),
        ("tokenizer.ggml.eos_token_id", 1 << 20, "eos_token_id is 1048576, and it has 265 tokens"),
        ("tokenizer.ggml.add_bos_token", "no", "add_bos_token is 'no', not true or false"),
        ("tokenizer.chat_template", 7, "chat_template is 7, not a text"),
        (
            "general.architecture",
            "lla\x1b[31mma\n",
            r"of architecture 'lla\\x1b\[31mma\\n', which is none of llama",
        ),
    ],
)
def test_values_of_another_type_are_one_sentence(
    key: str, change: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(tmp_path / "cache"))
    write = gguf.GGUFWriter.write_kv_data_to_file

    def changed(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key)
        match change:
            case bool() | str():
                writer.add_string(key, str(change))
            case int():
                writer.add_int32(key, change)
            case float():
                writer.add_float32(key, change)
            case list():
                writer.add_array(key, change)
        write(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_kv_data_to_file", changed)
    path = write_gguf(tmp_path / "a.gguf", kinds=MIXES["Q8_0"])
    with pytest.raises(ModelUnavailable, match=f"a.gguf could not be read: .*{words}") as caught:
        ensure_model(str(path))
    assert "Traceback" not in caught.value.message
    assert "\n" not in caught.value.message


def test_the_process_that_reads_a_file_has_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(1000))
    script = (
        "import resource, sys; from pathlib import Path; from loraplex.app.base_model.gguf_file import run_limited\n"
        "def work():\n"
        "    print(*(resource.getrlimit(what)[0] for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU)), flush=True)\n"
        "    bytearray(9 << 30)\n"
        f"sys.exit(run_limited(Path({str(path)!r}), work))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    memory, seconds = map(int, done.stdout.split())
    assert memory <= (8 << 30) + 1000
    assert seconds <= 300
    assert (done.returncode, done.stderr) == (1, "more than 8 GiB of memory are needed\n")
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] != seconds
