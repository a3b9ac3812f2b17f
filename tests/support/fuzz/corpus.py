"""Hostile uploads, made from a seed: archives, headers, configs and forms that try to get out, to blow up, or to lie.

Names that point anywhere hold `MARK`, so that a file that got out is found by it.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.adapters.archives import CONFIG, TENSORS, Files, make_tar, make_zip, tar_of
from support.adapters.raw_archives import BLOCK, ZIP_FIELDS, pax_record, raw_member, tar_member, zip64
from support.http import multipart

MARK = "loraplex-escaped"
ESCAPES = (
    f"../{MARK}",
    f"../../../../{MARK}",
    f"/tmp/{MARK}",
    f"a/../../{MARK}",
    f"./../{MARK}",
    f"..\\..\\{MARK}",
    f"C:\\{MARK}",
    f"/proc/self/cwd/{MARK}",
    f"adapter_config.json/../../{MARK}",
    f"~/{MARK}",
)


@dataclass(frozen=True)
class Upload:
    """One request's body, with what it is for the person who reads a failure. `fits` is true for what the server
    must take."""

    label: str
    body: bytes
    fits: bool = False


class Corpus:
    """`files` is a good adapter, `cap` what the server takes of an upload, in bytes."""

    def __init__(self, seed: int, files: Files, cap: int) -> None:
        self._random = random.Random(seed)
        self._files = files
        self._cap = cap

    def uploads(self, *, mutations: int) -> Iterator[Upload]:
        """Every family once, then `mutations` good uploads with damage at random."""
        for label, content in self._archives():
            yield Upload(f"archive: {label}", _archive_body(content))
        for label, config, tensors in self._pairs():
            yield Upload(f"files: {label}", multipart.files(config, tensors))
        for label, body in self._forms():
            yield Upload(f"form: {label}", body)
        for number in range(mutations):
            yield self._mutation(number)
        yield Upload("a good one", multipart.files(self._files[CONFIG], self._files[TENSORS]), fits=True)

    # Archives.

    def _archives(self) -> Iterator[tuple[str, bytes]]:
        yield from self._escapes()
        yield from self._strange_members()
        yield from self._extended_headers()
        yield from self._lies()
        yield from self._bombs()
        yield from self._gzips()
        yield "empty", b""
        yield "one byte", b"\0"
        yield "zeros", bytes(1 << 20)

    def _escapes(self) -> Iterator[tuple[str, bytes]]:
        for name in ESCAPES:
            for full in (name, f"{name}/{TENSORS}"):
                yield f"tar to {full}", make_tar({**self._files, full: b"x"})
                yield f"zip to {full}", make_zip({**self._files, full: b"x"})
        for name in ("a" * 5000, "a/" * 2000 + CONFIG, "\x01\x1b[31m\r\n", "ü" * 300, " ", ".", "a\\b"):
            yield f"tar with the name {name[:20]!r}", make_tar({**self._files, name: b"x"})
            yield f"zip with the name {name[:20]!r}", make_zip({**self._files, name: b"x"})

    def _strange_members(self) -> Iterator[tuple[str, bytes]]:
        good = [(tar_member(name, len(data)), data) for name, data in self._files.items()]
        for kind in (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.BLKTYPE,
            tarfile.FIFOTYPE,
            tarfile.CONTTYPE,
            tarfile.GNUTYPE_SPARSE,
            b"M",
            b"V",
            b"Z",
        ):
            for name in (CONFIG, "link"):
                member = tar_member(name, 0)
                member.type = kind
                member.linkname = f"../../{MARK}"
                behind = tar_member(f"link/{CONFIG}", 1)
                yield f"member of type {kind!r}, {name}", tar_of((member, b""), (behind, b"x"), *good)
        folder = tar_member(CONFIG, 0)
        folder.type = tarfile.DIRTYPE
        yield "a folder named as the config", tar_of((folder, b""), *good)
        yield "twice the same", tar_of(*good, *good)
        yield "two adapters", make_tar({f"{d}/{n}": c for d in "ab" for n, c in self._files.items()})
        yield "many members", make_tar({f"f{i}": b"" for i in range(12_000)})
        yield "many members in a zip", make_zip({f"f{i}": b"" for i in range(12_000)})
        yield "pickles", make_zip({"adapter_model.bin": b"\x80\x04.", "weights.pt": b"x"})
        link = zipfile.ZipInfo(CONFIG)
        link.external_attr = 0o120777 << 16
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(link, f"/tmp/{MARK}")
            archive.writestr(TENSORS, self._files[TENSORS])
        yield "a link in a zip", out.getvalue()

    def _extended_headers(self) -> Iterator[tuple[str, bytes]]:
        rest = make_tar(self._files)
        for key, value in (
            ("path", f"../../{MARK}"),
            ("linkpath", f"/tmp/{MARK}"),
            ("size", str(1 << 60)),
            ("size", "-1"),
            ("size", "0x10"),
            ("GNU.sparse.name", f"../{MARK}"),
            ("GNU.sparse.realsize", str(1 << 50)),
            ("GNU.sparse.map", "0,1,2"),
            ("path", "a" * 1_000_000),
            ("path", "a\0b"),
            ("charset", "BINARY"),
            ("hdrcharset", "ISO-IR 10646 2000 UTF-8"),
        ):
            for kind in (b"x", b"g"):
                record = pax_record(key, value)
                yield f"pax {kind!r} {key}={value[:20]!r}", raw_member("pax", record, kind) + rest
        for record in (
            b"99999999999999999999 path=a\n",
            b"5 a=b",
            b"-3 a=b\n",
            b"x",
            b"7 a=b\n\n",
            b"0 \n",
            b"6 path\n",
        ):
            yield f"pax record {record!r}", raw_member("pax", record, b"x") + rest
        for size in (10, 5000, 2_000_000):
            yield f"GNU long name of {size}", raw_member("@", b"a" * size, b"L") + rest
            yield f"GNU long link of {size}", raw_member("@", b"a" * size, b"K") + rest
        yield "many long names", raw_member("@", b"a" * 900, b"L") * 3000 + rest

    def _lies(self) -> Iterator[tuple[str, bytes]]:
        config = self._files[CONFIG]
        for size in (1 << 33, 1 << 62, self._cap + 1, len(config) + 1, 0):
            yield f"tar that says {size} bytes", raw_member(CONFIG, config, b"0", size=size)
        for field in (
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"-0000000001\0",
            b"99999999999\0",
            b"           \0",
            b"\0" * 12,
        ):
            yield f"tar with the size {field!r}", raw_member(CONFIG, config, b"0", field=field)
        yield (
            "tar with a wrong checksum",
            make_tar(self._files)[:148] + b"0000000\0" + make_tar(self._files)[156:],
        )
        good = make_zip(self._files)
        for magic, at, width in ZIP_FIELDS:
            for value in (0, 1, 0xFFFFFFFF, 0xFFFFFFFE):
                start = good.index(magic) + at
                changed = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
                yield f"zip with {value:#x} at {magic!r}+{at}", good[:start] + changed + good[start + width :]
        yield "zip64 that says the end of the world", zip64(1 << 63)
        yield "zip64 with a short field", zip64(1 << 40, cut=5)
        yield "zip behind something else", bytes(3000) + good
        yield (
            "zip with a long comment",
            make_zip(self._files)[:-2] + struct.pack("<H", 65535) + b"PK\x05\x06" * 16383,
        )
        yield "two zips", good + good

    def _bombs(self) -> Iterator[tuple[str, bytes]]:
        size = 3 * self._cap
        bomb = raw_member(TENSORS, b"", b"0", size=size)[:BLOCK]
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = packer.compress(bomb)
        for _ in range(size >> 20):
            packed += packer.compress(bytes(1 << 20))
        yield "tar.gz bomb", packed + packer.flush()
        yield "zip bomb", make_zip({**self._files, TENSORS: bytes(size)})
        yield "zip bomb of a member that is skipped", make_zip({**self._files, "x": bytes(size)})
        inner = make_zip({**self._files, TENSORS: bytes(1 << 22)})
        yield "a zip in a zip", make_zip({f"{i}.zip": inner for i in range(50)})
        within = bytes(self._cap - (1 << 20))
        yield "as large as it may be", make_zip({CONFIG: self._files[CONFIG], TENSORS: within})
        header = struct.pack("<Q", self._cap // 2)
        yield (
            "a header as large as it may be",
            make_zip({CONFIG: b"{}", TENSORS: header + b"{" + b" " * (self._cap // 2)}),
        )

    def _gzips(self) -> Iterator[tuple[str, bytes]]:
        tar = make_tar(self._files)
        packed = gzip.compress(tar)
        yield "gzip of gzip", gzip.compress(packed)
        yield "gzip of a zip", gzip.compress(make_zip(self._files))
        yield "gzip with rubbish behind it", packed + b"rubbish"
        yield "gzip cut in the middle", packed[: len(packed) // 2]
        yield "gzip without its end", packed[:-8]
        yield "many empty gzips", gzip.compress(b"") * 70_000
        yield "many gzips of a byte", b"".join(gzip.compress(tar[i : i + 1], 1) for i in range(3000))
        yield "gzip with all flags", b"\x1f\x8b\x08\xff" + bytes(6) + b"\xff\xff" + bytes(70_000)
        yield "gzip with a long name", b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * 3_000_000

    # Files.

    def _pairs(self) -> Iterator[tuple[str, bytes, bytes]]:
        config, tensors = self._files[CONFIG], self._files[TENSORS]
        for label, text in self._jsons():
            yield f"config: {label}", text, tensors
            yield f"header: {label}", config, struct.pack("<Q", len(text)) + text
        for length in (0, 1, len(tensors), 1 << 31, 1 << 40, (1 << 64) - 1):
            yield f"header of {length} bytes", config, struct.pack("<Q", length) + tensors[8:]
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        for label, change in {
            "negative shape": {"shape": [-1]},
            "huge shape": {"shape": [1 << 62, 1 << 62]},
            "many dimensions": {"shape": [1] * 10_000},
            "a shape of true": {"shape": [True]},
            "offsets beyond": {"data_offsets": [0, 1 << 60]},
            "offsets backwards": {"data_offsets": [4, 0]},
            "offsets of fractions": {"data_offsets": [0.5, 4.5]},
            "an unknown type": {"dtype": "F99"},
            "a type of lists": {"dtype": ["F32"]},
        }.items():
            text = json.dumps({"base_model.model.x.lora_A.weight": entry | change}).encode()
            yield label, config, struct.pack("<Q", len(text)) + text + bytes(4)
        for fill in (b"\xff", b"\x7f\x80", b"\0"):
            header = 8 + struct.unpack("<Q", tensors[:8])[0]
            data = (fill * len(tensors))[: len(tensors) - header]
            yield f"values of {fill!r}", config, tensors[:header] + data
        yield "cut tensors", config, tensors[: len(tensors) // 2]
        yield "more than the tensors", config, tensors + b"x"
        yield "nothing", b"", b""
        yield "exchanged", tensors[: 1 << 19], config
        yield "a large config", b" " * ((1 << 20) - 2) + b"{}", tensors
        yield "a config above its limit", b" " * (1 << 20) + b"{}", tensors
        yield "tensors above the cap", config, bytes(self._cap + 1)

    def _jsons(self) -> Iterator[tuple[str, bytes]]:
        yield "deep lists", b"[" * 100_000
        yield "deep objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000
        yield "a long number", b'{"r": ' + b"9" * 100_000 + b"}"
        yield "a large exponent", b'{"r": 1e999999}'
        yield "not a number", b'{"r": NaN, "lora_alpha": -Infinity}'
        yield "twice the same key", b'{"r": 4, "r": 8}'
        yield "not UTF-8", b'{"r": "\xff\xfe"}'
        yield "a lone surrogate", b'{"peft_type": "\\ud800"}'
        yield "UTF-16", json.dumps({"r": 4}).encode("utf-16")
        yield "many keys", json.dumps({f"k{i}": i for i in range(30_000)}).encode()
        yield "a list", b"[1, 2]"
        yield "a string", b'"LORA"'
        yield (
            "types that are wrong",
            json.dumps({"r": [], "target_modules": {"a": 1}, "peft_type": {}}).encode(),
        )
        pattern = {
            "peft_type": "LORA",
            "r": 4,
            "target_modules": "(a+)+" * 50 + "$",
            "rank_pattern": {"(.*)*" * 99: 4},
        }
        yield "patterns that never end", json.dumps(pattern).encode()
        yield "control characters", json.dumps({"peft_type": "\x1b[2J\r\n" + MARK}).encode()

    # Forms.

    def _forms(self) -> Iterator[tuple[str, bytes]]:
        config, tensors = self._files[CONFIG], self._files[TENSORS]
        for name in ESCAPES:
            yield (
                f"a file name of {name}",
                multipart.body(
                    multipart.part("file", config, filename=name.replace('"', "")),
                    multipart.part(TENSORS, tensors, filename=TENSORS),
                ),
            )
            yield f"a part named {name}", multipart.body(multipart.part(name, config, filename=CONFIG))
        yield "a part twice", multipart.body(*[multipart.part(CONFIG, config)] * 2)
        yield "no parts", multipart.end()
        yield "no end", multipart.part(CONFIG, config)
        yield "a wrong boundary", b"--other\r\n\r\nx\r\n--other--\r\n"
        yield "many headers", multipart.body(multipart.part(CONFIG, config, headers=b"x-a: b\r\n" * 50))
        yield (
            "a long header",
            multipart.body(multipart.part(CONFIG, config, headers=b"x-a: " + b"b" * 60_000 + b"\r\n")),
        )
        yield (
            "base64",
            multipart.body(multipart.part(CONFIG, config, headers=b"content-transfer-encoding: base64\r\n")),
        )
        yield "many parts", multipart.body(*[multipart.part(f"p{i}", b"") for i in range(2000)])
        yield "no headers", b"--" + multipart.BOUNDARY.encode() + b"\r\n\r\nx\r\n" + multipart.end()
        yield (
            "archive and files",
            multipart.body(multipart.part("archive", make_zip(self._files)), multipart.part(CONFIG, config)),
        )

    # Damage at random.

    def _mutation(self, number: int) -> Upload:
        rng = self._random
        makers: list[tuple[str, Callable[[Files], bytes]]] = [
            ("tar", make_tar),
            ("tar.gz", lambda files: make_tar(files, "w:gz")),
            ("zip", make_zip),
            ("stored zip", lambda files: make_zip(files, zipfile.ZIP_STORED)),
            ("files", lambda files: multipart.files(files[CONFIG], files[TENSORS])),
        ]
        kind, make = rng.choice(makers)
        content = bytearray(make(self._files))
        how = rng.choice(("bits", "bytes", "cut", "repeat", "drop"))
        at = rng.randrange(min(len(content), rng.choice((64, 600, len(content)))))
        if how == "bits":
            for _ in range(rng.randint(1, 8)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif how == "bytes":
            content[at : at + rng.randint(1, 16)] = rng.randbytes(rng.randint(1, 16))
        elif how == "cut":
            del content[at:]
        elif how == "repeat":
            content[at:at] = content[at : at + rng.randint(1, 2000)] * rng.randint(1, 20)
        else:
            del content[at : at + rng.randint(1, 600)]
        body = bytes(content) if kind == "files" else _archive_body(bytes(content))
        return Upload(f"mutation {number}: {kind}, {how} at {at}", body)


def _archive_body(content: bytes) -> bytes:
    return multipart.body(multipart.part("archive", content, filename="archive"))


def escaped(*roots: Path) -> list[Path]:
    """Files below `roots` that an upload put where it must not."""
    return [path for root in roots for path in root.rglob(f"*{MARK}*")]
