"""A store, an arena and the transport between them, with real files and real threads."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.cache.adapter_cache import AdapterCache, Residency
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import HostSlab
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.device.transport import ThreadedTransport
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import digest_upload
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.cache_integrity import check_cache
from support.adapters.drafts import AdapterDraft, AdapterFiles, TinyBase, write_base
from support.adapters.lora_zoo import dirty_arena

ARCH = TinyBase()
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 32, (32, 16, 16)),
    SiteGroup("o", ("o_proj",), 32, (32,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 32, (48, 48)),
    SiteGroup("down", ("down_proj",), 48, (32,)),
)
PATIENCE_S = 30.0


class TransportRig:
    """A store, an arena full of NaN (where not `dirty`: never written to), and the transport between them."""

    def __init__(
        self,
        root: Path,
        *,
        num_pages: int = 8,
        num_slots: int = 3,
        host_bytes: int = 1 << 20,
        dirty: bool = True,
    ) -> None:
        self.root = root
        self.store = ArtifactStore(root / "store")
        base = load_base_spec(write_base(root / "base", ARCH))
        self.layout = ArenaLayout(GROUPS, ARCH.layers, torch.float32, max_rank=16, page_bytes=16 << 10)
        if dirty:
            self.arena = dirty_arena(self.layout, num_pages, num_slots)
        else:
            self.arena = AdapterArena(
                self.layout,
                num_pages=num_pages,
                num_slots=num_slots,
                kernels=resolve_kernels("torch", torch.device("cpu")),
            )
        self.woken = threading.Semaphore(0)
        self.host = HostSlab(host_bytes, self.layout.page_bytes)
        self.transport = ThreadedTransport(self.store, base, self.arena, self.host, wake=self.woken.release)
        self.cache: AdapterCache[HostImage] = AdapterCache(
            transport=self.transport,
            num_pages=num_pages,
            num_slots=num_slots,
            host_bytes=self.host.num_bytes,
            load_timeout_s=PATIENCE_S,
            clock=lambda: 0.0,
        )
        self._made = 0

    def put(self, draft: AdapterDraft) -> AdapterRef:
        """Store an adapter as the upload does."""
        files = draft.write(self.root / "made")
        digest = digest_upload(files.config, files.tensors)
        with self.store.begin_staging() as staging:
            staging.config_path.write_bytes(files.config.read_bytes())
            staging.tensors_path.write_bytes(files.tensors.read_bytes())
            self.store.commit(staging, digest)
        self._made += 1
        return AdapterRef("tenant", f"adapter-{self._made}", 1, digest, draft.config["r"])

    def files(self, ref: AdapterRef) -> AdapterFiles:
        folder = self.store.path(ref.digest)
        return AdapterFiles(folder / "adapter_config.json", folder / "adapter_model.safetensors")

    def wait(self, ticket: Ticket) -> None:
        while not ticket.done:
            assert self.woken.acquire(timeout=PATIENCE_S), "nobody woke the step thread"

    def fetch(self, ref: AdapterRef) -> Residency:
        """Ask until the answer is final, sleeping until woken in between."""
        while True:
            self.cache.poll()
            self.cache.begin_pass()
            residency = self.cache.request(ref)
            check_cache(self.cache)
            if residency is not Residency.LOADING:
                return residency
            if self.cache.state(ref.digest) == "hot":
                continue  # its copy was quick
            assert self.woken.acquire(timeout=PATIENCE_S), "nobody woke the step thread"

    def error_of(self, ref: AdapterRef) -> str:
        ticket = self.transport.load(ref)
        self.wait(ticket)
        assert ticket.error is not None
        return ticket.error
