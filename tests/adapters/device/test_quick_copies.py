"""On a CPU: copies that the step's thread does itself, into pages that were written to before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.device import transport
from loraplex.adapters.device.host_image import HostImage
from support.adapters.drafts import draft_adapter
from support.adapters.transport_rig import ARCH, PATIENCE_S, TransportRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TransportRig]:
    rig = TransportRig(tmp_path, dirty=False)
    yield rig
    rig.transport.close()


def loaded(rig: TransportRig) -> HostImage:
    ticket = rig.transport.load(rig.put(draft_adapter(ARCH)))
    rig.wait(ticket)
    return ticket.value


def fill(rig: TransportRig, image: HostImage, slot: int, pages: tuple[int, ...]) -> None:
    rig.wait(rig.transport.copy(image, slot, pages))
    while rig.transport._copiers.is_working:
        time.sleep(0.001)
    rig.transport.clear(slot)


def test_the_first_write_to_a_page_is_left_to_the_thread(
    rig: TransportRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, pages = loaded(rig), (0,)
    writers: list[str] = []
    write = rig.arena.write

    def watched(*args: Any) -> None:
        writers.append(threading.current_thread().name)
        write(*args)

    monkeypatch.setattr(rig.arena, "write", watched)
    fill(rig, image, 0, pages)
    assert rig.transport.copy(image, 0, pages).done
    assert writers == ["adapter-copy", threading.current_thread().name]


def test_a_large_image_is_left_to_the_thread(rig: TransportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    image = loaded(rig)
    fill(rig, image, 0, (0,))
    monkeypatch.setattr(transport, "QUICK_COPY_BYTES", image.num_bytes - 1)
    gate = threading.Event()
    monkeypatch.setattr(rig.transport, "_copy", lambda *_: gate.wait(PATIENCE_S))
    ticket = rig.transport.copy(image, 0, (0,))
    assert not ticket.done
    gate.set()
    rig.wait(ticket)


def test_beside_a_copy_of_the_thread_it_waits_its_turn(
    rig: TransportRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = loaded(rig)
    fill(rig, image, 0, (0,))
    gate = threading.Event()
    copy = rig.transport._copy

    def slow(*args: Any) -> None:
        assert gate.wait(PATIENCE_S)
        copy(*args)

    monkeypatch.setattr(rig.transport, "_copy", slow)
    first = rig.transport.copy(image, 1, (1,))
    second = rig.transport.copy(image, 0, (0,))
    assert not second.done
    gate.set()
    rig.wait(first)
    rig.wait(second)
