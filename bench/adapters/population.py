"""Thousands of random adapters for a model, registered on a running server, and traces of requests for them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.model.outline import outline_model
from loraplex.engine.sizing import adapter_pages
from support.adapters.drafts import ALL_SITES, TinyBase, frame_header, peft_config, site_module
from support.servers.live_server import ADAPTER_FILES, LiveServer, checked

SCALE = 0.02
"""The standard deviation of A and B."""
STEP = 61
"""Each adapter's numbers begin this far behind those of the one before."""
UPLOADS = 4
"""At a time."""


@dataclass(frozen=True)
class Kind:
    """What the adapters have in common. Adapter number i has rank `ranks[i % len(ranks)]` on `sites` of every layer;
    `stored` is the dtype of their files."""

    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    stored: str = "F32"


KINDS = {
    "qv": Kind((8,), ("q_proj", "v_proj")),
    "mixed": Kind((8, 16, 32, 64), ALL_SITES, "BF16"),
}


def architecture(model: Path) -> TinyBase:
    """The shapes of a model directory of Llama's form."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return TinyBase(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
    )


class AdapterFactory:
    """Makes adapters of a kind as the bytes of an upload, each with numbers of its own.

    They are slices of one sequence of random numbers, so that an adapter costs a copy of its bytes.
    """

    def __init__(self, arch: TinyBase, kind: Kind, count: int) -> None:
        self._kind = kind
        self._shapes = {rank: _shapes(arch, kind, rank) for rank in kind.ranks}
        self._sizes = {rank: sum(a * b for _, (a, b) in shapes) for rank, shapes in self._shapes.items()}
        dtype = np.dtype(np.float32) if kind.stored == "F32" else np.dtype(ml_dtypes.bfloat16)
        numbers = max(self._sizes.values()) + STEP * count
        values = np.random.default_rng(7).standard_normal(numbers, np.float32) * np.float32(SCALE)
        self._values = values.astype(dtype)
        self._headers = {rank: self._header(rank, dtype.itemsize) for rank in kind.ranks}

    def files(self, number: int) -> dict[str, bytes]:
        """The two files of adapter `number`, by name."""
        rank = self._kind.ranks[number % len(self._kind.ranks)]
        config = peft_config(r=rank, lora_alpha=rank, target_modules=list(self._kind.sites))
        first = number * STEP
        values = self._values[first : first + self._sizes[rank]]
        made = (json.dumps(config).encode(), self._headers[rank] + values.tobytes())
        return dict(zip(ADAPTER_FILES, made, strict=True))

    def _header(self, rank: int, itemsize: int) -> bytes:
        header: dict[str, object] = {}
        offset = 0
        for name, shape in self._shapes[rank]:
            end = offset + shape[0] * shape[1] * itemsize
            header[name] = {"dtype": self._kind.stored, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        return frame_header(json.dumps(header).encode(), align=8)


def _shapes(arch: TinyBase, kind: Kind, rank: int) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of an adapter's tensors, in the order of its file."""
    shapes: list[tuple[str, tuple[int, int]]] = []
    for layer, site in itertools.product(range(arch.layers), kind.sites):
        out_features, in_features = arch.out_in(site)
        prefix = f"base_model.model.{site_module(layer, site)}"
        shapes.append((f"{prefix}.lora_A.weight", (rank, in_features)))
        shapes.append((f"{prefix}.lora_B.weight", (out_features, rank)))
    return shapes


def mean_bytes(model: Path, kind: Kind) -> int:
    """Device memory of an adapter, the mean over the ranks."""
    outline = outline_model(model, torch.device("cpu"), "auto")
    layout = ArenaLayout(
        outline.site_groups, outline.num_layers, outline.dtype, max_rank=64, head=outline.head_group
    )
    pages = [adapter_pages(layout, rank, kind.sites) for rank in kind.ranks]
    return sum(pages) * layout.page_bytes // len(pages)


@dataclass(frozen=True)
class Population:
    """Registered adapters: number i is called `name(i)`, and belongs to `tenant(i)`."""

    keys: tuple[str, ...]
    count: int

    def tenant(self, number: int) -> str:
        return f"t{number % len(self.keys)}"

    def key(self, number: int) -> str:
        return self.keys[number % len(self.keys)]

    @staticmethod
    def name(number: int) -> str:
        return f"a{number}"


def register(server: LiveServer, factory: AdapterFactory, count: int, tenants: int) -> Population:
    """Create tenants with a key each, and upload `count` adapters through the admin API."""
    for number in range(tenants):
        server.create_tenant(f"t{number}")
    keys = tuple(server.create_key(f"t{number}") for number in range(tenants))
    population = Population(keys, count)
    headers = {"authorization": f"Bearer {server.admin_token}"}
    with httpx.Client(base_url=f"{server.admin_url}/admin/v1/", headers=headers, timeout=300) as client:

        def upload(number: int) -> None:
            where = f"tenants/{population.tenant(number)}/adapters/{population.name(number)}/versions"
            files = {name: (name, data) for name, data in factory.files(number).items()}
            checked(client.post(where, files=files), 201)

        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(upload, range(count)))
    return population


def zipf(count: int, exponent: float, seed: int) -> Iterator[int]:
    """Numbers below `count`, without end: k with the weight (k + 1) ** -exponent."""
    rng = random.Random(f"{seed}/zipf")
    cumulative = list(itertools.accumulate((k + 1) ** -exponent for k in range(count)))
    while True:
        yield from rng.choices(range(count), cum_weights=cumulative, k=256)


def power_law(count: int, alpha: float, seed: int) -> Iterator[int]:
    """S-LoRA's: count * u ** (1 / alpha), with u uniform in [0, 1). With alpha 1 all are asked for alike."""
    rng = random.Random(f"{seed}/power law")
    while True:
        yield int(count * rng.random() ** (1 / alpha))


def gamma_arrivals(rate: float, variation: float, seed: int) -> Iterator[float]:
    """Seconds from the start, without end: `rate` a second, gaps of a Gamma distribution with this coefficient of
    variation."""
    rng = random.Random(f"{seed}/arrivals")
    shape = 1 / variation**2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (rate * shape))
        yield at
