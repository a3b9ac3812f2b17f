"""The way from files on disk to pages on the device, with real files, real threads and the real arena."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.cache.adapter_cache import Residency
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.host_image import HostImage
from support.adapters.drafts import (
    NUMPY_DTYPES,
    AdapterDraft,
    TinyBase,
    draft_adapter,
    site_module,
)
from support.adapters.transport_rig import ARCH, GROUPS, PATIENCE_S, TransportRig
from support.kernels.lora_reference import lora_reference


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TransportRig]:
    rig = TransportRig(tmp_path)
    yield rig
    rig.transport.close()


def dense(draft: AdapterDraft, layer: int, scaling: float) -> dict:
    found = {}
    for group in GROUPS:
        for site in group.sites:
            name = f"base_model.model.{site_module(layer, site)}"
            if f"{name}.lora_A.weight" in draft.tensors:
                a, b = (
                    torch.from_numpy(draft.tensors[f"{name}.{part}.weight"].astype("f4"))
                    for part in ("lora_A", "lora_B")
                )
                found[site] = a, b, scaling
    return found


def test_adapters_from_disk_compute_the_formula(rig: TransportRig) -> None:
    drafts = [
        draft_adapter(ARCH, rank=4, lora_alpha=8, seed=1),
        draft_adapter(ARCH, rank=16, lora_alpha=8, use_rslora=True, targets=["o_proj", "down_proj"], seed=2),
        draft_adapter(
            ARCH, rank=9, lora_alpha=9, targets=["gate_proj", "up_proj", "k_proj"], dtype="BF16", seed=3
        ),
    ]
    scalings = [2.0, 2.0, 1.0]
    refs = [rig.put(draft) for draft in drafts]
    assert [rig.fetch(ref) for ref in refs] == [Residency.READY] * 3
    leases = [rig.cache.acquire(ref.digest) for ref in refs]
    owners = [0, 1, None, 2, 1, 0]
    segments = [(-1 if owner is None else leases[owner].slot, row, 1) for row, owner in enumerate(owners)]
    lora = rig.arena.lora_pass(segments, len(owners))
    assert lora is not None
    for layer in range(ARCH.layers):
        for group in GROUPS:
            x, y = torch.randn(6, group.in_features), torch.randn(6, sum(group.out_features))
            rows = [None if o is None else dense(drafts[o], layer, scalings[o]) for o in owners]
            expected = lora_reference(x, y, group, rows)
            lora.apply(layer, group.key, x, y)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_evicted_adapter_comes_back_to_other_pages_unharmed(rig: TransportRig) -> None:
    drafts = [
        draft_adapter(ARCH, rank=16, targets=["q_proj", "up_proj"], seed=seed, lora_alpha=16)
        for seed in range(6)
    ]
    refs = [rig.put(draft) for draft in drafts]
    generator = torch.Generator().manual_seed(0)
    for index in [0, 1, 2, 3, 4, 5, 0, 3, 1, 5, 2, 0]:
        rig.cache.begin_pass()  # the last one that came has had its pass
        assert rig.fetch(refs[index]) is Residency.READY
        lease = rig.cache.acquire(refs[index].digest)
        lora = rig.arena.lora_pass([(lease.slot, 0, 3)], 3)
        assert lora is not None
        x, y = torch.randn(3, 32, generator=generator), torch.zeros(3, 64)
        expected = lora_reference(x, y, GROUPS[0], [dense(drafts[index], 1, 1.0)] * 3)
        lora.apply(1, "qkv", x, y)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        rig.cache.release(lease)
    assert rig.cache.usage().device_evictions > 0


def test_a_step_that_names_an_evicted_slot_is_refused(rig: TransportRig) -> None:
    ref = rig.put(draft_adapter(ARCH))
    assert rig.fetch(ref) is Residency.READY
    lease = rig.cache.acquire(ref.digest)
    rig.cache.release(lease)
    rig.cache.drop(ref.digest)
    with pytest.raises(ValueError, match="holds no adapter"):
        rig.arena.lora_pass([(lease.slot, 0, 1)], 1)


def test_damaged_bytes_are_not_served(rig: TransportRig) -> None:
    ref = rig.put(draft_adapter(ARCH))
    path = rig.files(ref).tensors
    path.chmod(0o600)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert "is damaged" in rig.error_of(ref)
    assert rig.fetch(ref) is Residency.FAILED
    assert "is damaged" in rig.cache.failure(ref.digest)
    assert rig.cache.take_damaged() == (ref.digest,)
    assert rig.cache.take_damaged() == ()


def test_damage_is_named_whatever_it_leads_to(rig: TransportRig) -> None:
    """Bytes are parsed while they are hashed, so a damaged file may fail in any way before its digest is known."""
    draft = draft_adapter(ARCH)
    whole = rig.files(rig.put(draft)).tensors.read_bytes()
    name, end = whole.index(b"lora_A"), len(whole)
    damages = {
        "length": b"\xff" * 8 + whole[8:],
        "json": whole[:9] + b"\0" + whole[10:],
        "name": whole[:name] + b"LORA" + whole[name + 4 :],
        "value": whole[: end - 4] + np.float32(np.nan).tobytes(),
        "cut": whole[: end - 100],
        "longer": whole + b"\0",
    }
    for seed, (kind, raw) in enumerate(damages.items()):
        ref = rig.put(draft_adapter(ARCH, seed=seed + 10))
        rig.files(ref).tensors.write_bytes(raw)
        assert "is damaged" in rig.error_of(ref), kind
        assert rig.fetch(ref) is Residency.FAILED
        assert rig.cache.take_damaged() == (ref.digest,), kind
    config = rig.put(draft_adapter(ARCH, seed=2))
    rig.files(config).config.write_bytes(b"{}")
    assert "is damaged" in rig.error_of(config)


def test_shared_inspection_covers_config_and_header_alone(rig: TransportRig) -> None:
    """Adapters of one recipe, and others that differ from it in the scaling or in the order of the file."""
    drafts = [draft_adapter(ARCH, rank=4, lora_alpha=8, seed=seed) for seed in (1, 2)]
    drafts.append(draft_adapter(ARCH, rank=4, lora_alpha=4, seed=2))
    turned = draft_adapter(ARCH, rank=4, lora_alpha=8, seed=2)
    turned.tensors = dict(reversed(turned.tensors.items()))
    drafts.append(turned)
    images = []
    for draft in drafts:
        ref = rig.put(draft)
        ticket = rig.transport.load(ref)
        rig.wait(ticket)
        assert ticket.value.digest == ref.digest
        images.append(torch.cat(ticket.value.memory.runs))
    first, second, half, other_order = images
    assert not torch.equal(first, second)
    assert not torch.equal(half, second)
    assert torch.equal(other_order, second)


def test_a_whole_file_in_place_of_another_is_damage_too(rig: TransportRig) -> None:
    """It parses, and fits: only its digest tells."""
    one, other = (rig.put(draft_adapter(ARCH, seed=seed)) for seed in (1, 2))
    rig.files(one).tensors.write_bytes(rig.files(other).tensors.read_bytes())
    assert "is damaged" in rig.error_of(one)
    assert rig.fetch(other) is Residency.READY


def test_files_that_are_gone_say_so(rig: TransportRig) -> None:
    ref = rig.put(draft_adapter(ARCH))
    rig.store.delete(ref.digest)
    assert "holds no artifact" in rig.error_of(ref)


def test_load_refuses_what_admission_refuses(rig: TransportRig) -> None:
    too_wide = rig.put(draft_adapter(ARCH, rank=17))
    assert "rank" in rig.error_of(too_wide)
    assert rig.fetch(too_wide) is Residency.FAILED
    assert rig.cache.take_damaged() == ()  # its bytes are as they were
    other_base = rig.put(draft_adapter(TinyBase(hidden=64, heads=8), rank=4))
    assert rig.error_of(other_base)


def test_a_scaling_that_overflows_is_refused(rig: TransportRig) -> None:
    """Each value is finite by itself; folded into B it is not, and would poison every request that shares a block."""
    draft = draft_adapter(ARCH, rank=4, lora_alpha=1e6)
    for name in draft.tensors:
        if "lora_B" in name:
            draft.tensors[name] = (draft.tensors[name] * 1e34).astype(NUMPY_DTYPES["F32"])
    ref = rig.put(draft)
    assert "not finite" in rig.error_of(ref)
    assert rig.fetch(ref) is Residency.FAILED
    assert rig.cache.take_damaged() == ()  # it is what was uploaded


def test_magnitudes_that_no_norm_fits_are_refused_and_harm_nobody(rig: TransportRig) -> None:
    draft, good = draft_adapter(ARCH, dora=True), rig.put(draft_adapter(ARCH, dora=True, seed=2))
    for name in draft.tensors:
        if "magnitude" in name:
            draft.tensors[name] = np.full_like(draft.tensors[name], 3e38)
    bad = rig.put(draft)
    assert rig.fetch(bad) is Residency.FAILED
    assert "not all finite: a row is zero or too large" in rig.cache.failure(bad.digest)
    assert rig.cache.take_damaged() == ()
    assert rig.fetch(good) is Residency.READY


def test_an_unforeseen_error_fails_the_load_alone(rig: TransportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = rig.put(draft_adapter(ARCH, seed=1)), rig.put(draft_adapter(ARCH, seed=2))

    def path(digest: str) -> Path:
        if digest == bad.digest:
            raise MemoryError
        return folder_of(digest)

    folder_of = rig.store.path
    monkeypatch.setattr(rig.store, "path", path)
    assert "MemoryError" in rig.error_of(bad)
    assert rig.fetch(good) is Residency.READY


def test_threads_that_hang_are_replaced(rig: TransportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads hang for good, both threads with them; after they are given up the next one passes."""
    hung, good = (
        [rig.put(draft_adapter(ARCH, seed=seed)) for seed in (1, 2)],
        rig.put(draft_adapter(ARCH, seed=3)),
    )
    end, entered = threading.Event(), threading.Semaphore(0)

    def path(digest: str) -> Path:
        if digest != good.digest:
            entered.release()
            end.wait(PATIENCE_S)
        return folder_of(digest)

    folder_of = rig.store.path
    monkeypatch.setattr(rig.store, "path", path)
    tickets = [rig.transport.load(ref) for ref in hung]
    assert all(entered.acquire(timeout=PATIENCE_S) for _ in tickets)
    never = rig.transport.load(hung[0])
    never.cancel()  # not begun: simply taken out of the line
    for ticket in tickets:
        ticket.cancel()
        ticket.cancel()
    late = rig.transport.load(good)
    rig.wait(late)
    assert late.error is None
    end.set()
    for ticket in tickets:
        rig.wait(ticket)
    assert never.error == "its load was cancelled"
    again = rig.transport.load(good)
    rig.wait(again)
    assert again.error is None


def test_loads_fail_at_once_when_too_many_threads_hang(
    rig: TransportRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = rig.put(draft_adapter(ARCH))
    end, entered = threading.Event(), threading.Semaphore(0)

    def path(digest: str) -> Path:
        entered.release()
        end.wait(PATIENCE_S)
        return folder_of(digest)

    folder_of = rig.store.path
    monkeypatch.setattr(rig.store, "path", path)
    monkeypatch.setattr("loraplex.adapters.device.transport.MAX_LOST_THREADS", 3)
    tickets = []
    for _ in range(5):
        tickets.append(rig.transport.load(ref))
        assert entered.acquire(timeout=PATIENCE_S)
        tickets[-1].cancel()
    assert "hang" in (rig.transport.load(ref).error or "")
    end.set()
    for ticket in tickets:
        rig.wait(ticket)


def test_close_ends_the_threads(rig: TransportRig) -> None:
    ref = rig.put(draft_adapter(ARCH))
    assert rig.fetch(ref) is Residency.READY
    threads = [*rig.transport._loaders._threads, *rig.transport._copiers._threads]
    assert len(threads) == 3
    rig.transport.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_job_that_cannot_tell_its_end_ends_no_thread(
    rig: TransportRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two loaders meet four of them; what comes then is loaded."""
    failures = [1] * 4
    release = rig.woken.release

    def wake() -> None:
        if failures:
            failures.pop()
            raise RuntimeError("the engine's wake-up is broken")
        release()

    monkeypatch.setattr(rig.transport, "_wake", wake)
    ref = rig.put(draft_adapter(ARCH))
    for _ in range(4):
        rig.transport.load(ref)
    rig.wait(rig.transport.load(ref))


def test_a_full_slab_makes_room_for_the_next_adapter(tmp_path: Path) -> None:
    """Images lie in the slab alone: what leaves the cache gives its pages back."""
    rig = TransportRig(tmp_path, num_pages=40, num_slots=8, host_bytes=3 * (16 << 10))
    refs = [rig.put(draft_adapter(ARCH, rank=4, seed=seed)) for seed in range(6)]
    try:
        for ref in [*refs, *refs]:
            assert rig.fetch(ref) is Residency.READY
            used = rig.cache.usage().host_bytes_used
            assert used == rig.host.num_bytes - rig.host.num_free * rig.host.page_bytes
            assert 0 < used <= rig.host.num_bytes
        assert rig.cache.usage().host_evictions > 0
        for ref in refs:
            rig.cache.drop(ref.digest)
        assert rig.host.num_free == rig.host.num_pages
    finally:
        rig.transport.close()


def test_an_image_that_nobody_wants_any_more_goes_back(rig: TransportRig) -> None:
    """Cancelled before it is read, and after."""
    ref = rig.put(draft_adapter(ARCH))
    late = rig.transport.load(ref)
    rig.wait(late)
    assert rig.host.num_free < rig.host.num_pages
    late.cancel()
    assert rig.host.num_free == rig.host.num_pages
    image = HostImage("any", 8, rig.host.take(2), np.empty((0, 5), np.int32))
    early: Ticket[HostImage] = Ticket(discard=HostImage.release)
    early.cancel()
    early.succeed(image)
    assert rig.host.num_free == rig.host.num_pages


def test_a_load_that_fails_gives_its_pages_back(rig: TransportRig) -> None:
    one, other = (rig.put(draft_adapter(ARCH, seed=seed)) for seed in (1, 2))
    rig.files(one).tensors.write_bytes(rig.files(other).tensors.read_bytes())
    assert "is damaged" in rig.error_of(one)
    infinite = draft_adapter(ARCH, seed=3)
    name = next(iter(infinite.tensors))
    infinite.tensors[name] = np.full_like(infinite.tensors[name], np.inf)
    assert rig.error_of(rig.put(infinite))
    assert rig.host.num_free == rig.host.num_pages
