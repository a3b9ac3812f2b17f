"""What reads a stranger's upload, as fuzzing targets: archives, headers, configs, whole adapters."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.safetensors_header import read_header
from loraplex.adapters.archive.extract import extract_upload
from loraplex.adapters.errors import AdapterRefused, RefusalCode
from loraplex.adapters.mlx.convert import convert_mlx
from loraplex.adapters.spec import BaseSpec, ExpertShape
from loraplex.adapters.split_linears import join_split_linears
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.tied_head import name_tied_head
from support.adapters.archives import CONFIG, CONTENT, LIMIT, MAKERS, TENSORS, Box, make_tar, make_zip, tar_of
from support.adapters.drafts import (
    AdapterDraft,
    TinyBase,
    draft_adapter,
    draft_parts,
    make_adapter,
    peft_config,
    write_base,
    write_delta_base,
)
from support.adapters.mlx_adapters import mlx_config, mlx_files, mlx_tensors
from support.adapters.whole_reads import parse_peft_config
from support.fuzz.fuzzing import Target
from support.models.expert_adapters import Arrays, pairs, stacks, three_dimensions, write

READ_BUFFERS = 8 << 20
"""What readers may hold beside what they return: windows, blocks, directories."""


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """The one way to say no, with a code that is documented and a text that may be shown."""
    refused = None
    try:
        yield
    except AdapterRefused as error:
        refused = error
    if refused is not None:
        assert refused.code in get_args(RefusalCode)
        assert refused.message.isascii()
        assert refused.message.isprintable()
        assert len(refused.message) < 2000


def archives(directory: Path) -> Target:
    """Nothing but the two files is written, only into the folder given, and no more than the cap."""
    box = Box(directory)
    small = {CONFIG: b"{}", TENSORS: b"\0" * 64}
    link = tarfile.TarInfo(CONFIG)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    climbing = {f"../{CONFIG}": b"{}", f"/{TENSORS}": b"x", f"a/../../{CONFIG}": b"{}"}
    zip64 = io.BytesIO()
    with zipfile.ZipFile(zip64, "w") as archive, archive.open(CONFIG, "w", force_zip64=True) as member:
        member.write(b"{}")
    corpus = [make(files) for make in MAKERS.values() for files in (small, CONTENT)]
    corpus += [
        make_tar(climbing),
        make_zip(climbing),
        make_tar({"a" * 300: b"x", **small}),
        tar_of((link, b"")),
    ]
    corpus += [
        zip64.getvalue(),
        make_zip({TENSORS: bytes(4 << 20), CONFIG: b"{}"}),
        gzip.compress(bytes(1 << 20)),
    ]
    corpus += [gzip.compress(make_tar(small)) + gzip.compress(b"more"), b"", b"PK\x05\x06" + bytes(18)]

    def run(data: bytes) -> None:
        box.archive.write_bytes(data)
        try:
            with _refusals():
                extract_upload(box.archive, box.dest, max_bytes=LIMIT)
            box.check_outside()
            assert sum(path.stat().st_size for path in box.dest.iterdir()) <= LIMIT
        finally:
            for leftover in box.dest.iterdir():
                assert stat.S_ISREG(leftover.lstat().st_mode)
                leftover.unlink()

    return Target("the archive reader", corpus, run, READ_BUFFERS)


def _tensors_file(header: object, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def headers(directory: Path) -> Target:
    """What is accepted lies in the file, in order, without an overlap."""
    path = directory / TENSORS
    two = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
        "__metadata__": {"format": "pt"},
    }
    corpus = [_tensors_file(two, bytes(22)), _tensors_file({}), b"", bytes(8), b"\xff" * 16]
    corpus.append(make_adapter(directory / "adapter", TinyBase()).tensors.read_bytes())

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with _refusals():
            end = 0
            for tensor in read_header(path).values():
                assert end <= tensor.start <= tensor.end <= len(data)
                end = tensor.end

    return Target("the safetensors header", corpus, run, READ_BUFFERS)


def configs(directory: Path) -> Target:
    """Settings come out, or a refusal; whatever comes out gives each module a finite scaling."""
    path = directory / CONFIG
    modules = [
        f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in ("q_proj", "v_proj")
    ]
    plain = peft_config()
    corpus = [
        json.dumps(plain).encode(),
        b"{}",
        b"",
        b"[]",
        json.dumps({**plain, "use_rslora": True}).encode(),
    ]
    for name, value in (
        ("rank_pattern", {"q_proj": 4, "^model.*v_proj": 2}),
        ("alpha_pattern", {"layers.1.self_attn.q_proj": 1e6}),
        ("target_modules", r".*\.(q|v)_proj$"),
        ("layers_to_transform", [0, 2]),
        ("exclude_modules", "q_proj"),
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
    ):
        corpus.append(json.dumps({**plain, name: value}).encode())

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with _refusals():
            settings = parse_peft_config(path, modules)
            for module in modules:
                rank, scaling = settings.rank_and_scaling(module)
                assert rank >= 1
                assert abs(scaling) < 1e9
                settings.selection.selects(module)

    return Target("the adapter config", corpus, run, READ_BUFFERS)


def adapters(directory: Path) -> Target:
    """A config and tensors together, inspected against a base: a specification with a digest, or a refusal. An input
    is the config's length, the config, the tensors."""
    base = load_base_spec(write_base(directory / "base", TinyBase()))
    config, tensors = directory / CONFIG, directory / TENSORS
    corpus = []
    for seed in range(3):
        made = make_adapter(directory / f"adapter-{seed}", TinyBase(), seed=seed)
        text = made.config.read_bytes()
        corpus.append(struct.pack("<H", len(text)) + text + made.tensors.read_bytes())

    def run(data: bytes) -> None:
        size = int.from_bytes(data[:2], "little")
        config.write_bytes(data[2 : 2 + size])
        tensors.write_bytes(data[2 + size :])
        with _refusals():
            spec = inspect_adapter(config, tensors, base, max_rank=64)
            assert len(spec.digest) == 64

    return Target("an adapter", corpus, run, 4 * READ_BUFFERS)


def expert_adapters(directory: Path) -> Target:
    """A target as `adapters`, for a mixture, with LoRA on its experts in each form that is read."""
    experts = {layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 2, 8, 6) for layer in range(2)}
    base = replace(load_base_spec(write_base(directory / "base", TinyBase())), experts=experts)
    config, tensors = directory / CONFIG, directory / TENSORS
    corpus = []
    parameters = {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}
    forms: list[tuple[Arrays, dict[str, Any]]] = [
        (pairs(experts), {}),
        (stacks(experts), parameters),
        (stacks(experts, turned=True), parameters | {"alpha_pattern": {r".*\.gate_up_proj": 3}}),
        (three_dimensions(experts, 2), {"r": 2}),
    ]
    for number, (arrays, fields) in enumerate(forms):
        made = write(directory / f"adapter-{number}", arrays, **fields)
        text = (made / CONFIG).read_bytes()
        corpus.append(struct.pack("<H", len(text)) + text + (made / TENSORS).read_bytes())

    def run(data: bytes) -> None:
        size = int.from_bytes(data[:2], "little")
        config.write_bytes(data[2 : 2 + size])
        tensors.write_bytes(data[2 + size :])
        with _refusals():
            inspect_adapter(config, tensors, base, max_rank=64)

    return Target("an adapter on experts", corpus, run, 4 * READ_BUFFERS)


def mlx_adapters(directory: Path) -> Target:
    """The two files of mlx-lm, as `adapters` has those of PEFT: they become PEFT's, which the inspection takes or
    refuses; or they stay as they were."""
    base = load_base_spec(write_base(directory / "base", TinyBase()))
    store = ArtifactStore(directory / "store")
    corpus = []
    for dora in (False, True):
        config = mlx_config(fine_tune_type="dora" if dora else "lora")
        text, tensors = mlx_files(config, mlx_tensors(TinyBase(), dora=dora)).values()
        corpus.append(struct.pack("<H", len(text)) + text + tensors)

    def run(data: bytes) -> None:
        size = int.from_bytes(data[:2], "little")
        with store.begin_staging() as staging, _refusals():
            staging.config_path.write_bytes(data[2 : 2 + size])
            staging.tensors_path.write_bytes(data[2 + size :])
            converted = convert_mlx(staging, 64, base.model_type)
            if converted:
                read_header(staging.tensors_path)
                assert json.loads(staging.config_path.read_bytes())["peft_type"] == "LORA"
            inspect_adapter(staging.config_path, staging.tensors_path, base, max_rank=64, earlier=converted)

    return Target("an adapter of mlx-lm", corpus, run, 4 * READ_BUFFERS)


def split_adapters(directory: Path) -> Target:
    """As `adapters`, with LoRA on parts of a linear: joined, which the inspection takes, or refused; or left as it
    was."""
    base = load_base_spec(write_delta_base(directory / "base"))
    return _rewritten(directory, [draft_parts(rank) for rank in (1, 4)], base, "an adapter of split linears")


def tied_heads(directory: Path) -> Target:
    """A target as `split_adapters`, with LoRA of a tied head under the embedding's name."""
    arch = TinyBase(tied=True)
    drafts = [draft_adapter(arch, rank=rank, targets=("q_proj", "lm_head")) for rank in (1, 4)]
    for draft in drafts:
        draft.config["target_modules"] = ["q_proj", "embed_tokens"]
        draft.tensors = {
            name.replace("lm_head", "model.embed_tokens"): tensor for name, tensor in draft.tensors.items()
        }
    base = load_base_spec(write_base(directory / "base", arch))
    return _rewritten(directory, drafts, base, "an adapter of a tied head")


def _rewritten(directory: Path, drafts: list[AdapterDraft], base: BaseSpec, what: str) -> Target:
    store = ArtifactStore(directory / "store")
    corpus = []
    for number, draft in enumerate(drafts):
        made = draft.write(directory / f"adapter-{number}")
        text = made.config.read_bytes()
        corpus.append(struct.pack("<H", len(text)) + text + made.tensors.read_bytes())

    def run(data: bytes) -> None:
        size = int.from_bytes(data[:2], "little")
        with store.begin_staging() as staging, _refusals():
            staging.config_path.write_bytes(data[2 : 2 + size])
            staging.tensors_path.write_bytes(data[2 + size :])
            changed = [*join_split_linears(staging, base, 64), *name_tied_head(staging, base)]
            if changed:
                read_header(staging.tensors_path)
            inspect_adapter(staging.config_path, staging.tensors_path, base, max_rank=64, earlier=changed)

    return Target(what, corpus, run, 4 * READ_BUFFERS)


TARGETS = {
    "archive": archives,
    "header": headers,
    "config": configs,
    "adapter": adapters,
    "experts": expert_adapters,
    "mlx": mlx_adapters,
    "split": split_adapters,
    "tied": tied_heads,
}
