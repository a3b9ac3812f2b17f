"""Reading an adapter from a folder that its tenant can write into."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.folder import MAX_ENTRIES, MAX_FOLDERS, copy_folder
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME

MAX_BYTES = 1 << 20
SECRET = b"what no tenant may read"


class Place:
    """`root` is allowed; `secret` lies beside it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "allowed"
        self.secret = directory / "secret"
        for folder in (self.root, self.secret):
            folder.mkdir()
        self.write("run", b"{}", b"tensors")
        for name in (CONFIG_NAME, TENSORS_NAME):
            (self.secret / name).write_bytes(SECRET)
        self.store = ArtifactStore(directory / "store")
        self.reserved: list[int] = []
        self.prefix = f"file://{self.root}"

    def write(self, folder: str, config: bytes, tensors: bytes) -> Path:
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_bytes(config)
        (path / TENSORS_NAME).write_bytes(tensors)
        return path

    def copy(self, folder: str = "run", fault: Callable[..., None] | None = None) -> dict[str, bytes]:
        """The files that came. Afterwards nothing is staged."""
        source = AllowedSources([self.prefix]).allow_path(str(self.root / folder), "acme")
        with self.store.begin_staging() as staging:
            if fault is not None:
                staging.fault = fault
            copy_folder(source, staging, max_bytes=MAX_BYTES, reserve=self.reserved.append)
            found = (path for path in staging.directory.rglob("*") if path.is_file())
            return {str(path.relative_to(staging.directory)): path.read_bytes() for path in found}

    def refused(self, folder: str = "run", kind: type[LoraplexError] = SourceNotFound) -> str:
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kind) as caught:
            self.copy(folder)
        assert SECRET.decode() not in caught.value.message
        assert len(os.listdir("/proc/self/fd")) == descriptors
        return caught.value.message


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_both_files_and_their_size_first(place: Place) -> None:
    assert place.copy() == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}
    assert place.reserved == [len(b"{}tensors")]


def test_the_one_adapter_of_a_folder_below(place: Place) -> None:
    whole = place.write("out/checkpoint-500", b"{1}", b"checkpoint")
    (place.root / "out" / "README.md").write_text("x")
    (place.root / "out" / "best").symlink_to("checkpoint-500")
    half = place.root / "out" / "checkpoint-100"
    half.mkdir()
    (half / CONFIG_NAME).write_bytes(b"{}")
    assert place.copy("out") == {CONFIG_NAME: b"{1}", TENSORS_NAME: b"checkpoint"}
    (whole / TENSORS_NAME).rename(whole / "adapters.safetensors")
    assert place.copy("out") == {CONFIG_NAME: b"{1}", TENSORS_NAME: b"checkpoint"}


def test_several_adapters_below_are_listed(place: Place) -> None:
    for step in (100, 200):
        place.write(f"out/checkpoint-{step}", b"{}", b"checkpoint")
    message = place.refused("out")
    assert "checkpoint-100" in message
    assert "checkpoint-200" in message
    place.write("out", b"{2}", b"final")
    assert place.copy("out")[TENSORS_NAME] == b"final"


def test_the_folder_s_own_adapter_is_found_among_many_files(place: Place) -> None:
    for number in range(MAX_ENTRIES + 10):
        (place.root / "run" / f"log-{number}").touch()
    assert place.copy() == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}


@pytest.mark.parametrize(
    ("name", "words"), [("adapter_model.bin", "torch.load("), ("adapters.npz", "numpy.load(")]
)
def test_weights_of_another_format_are_named(place: Place, name: str, words: str) -> None:
    (place.root / "run" / TENSORS_NAME).rename(place.root / "run" / name)
    assert words in place.refused("run", AdapterRefused)


def test_a_template_in_a_folder_of_its_own(place: Place) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    folder = (place.root / "run" / name).parent
    folder.mkdir()
    (folder / "tool_use.jinja").write_bytes(b"{{ tools }}")
    (folder / "rag.jinja").write_bytes(b"other")
    assert place.copy() == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors", name: b"{{ tools }}"}
    assert place.reserved == [len(b"{}tensors{{ tools }}")]
    shutil.rmtree(folder)
    (place.secret / "tool_use.jinja").write_bytes(SECRET)
    folder.symlink_to("../../secret")
    place.refused("run", SourceNotAllowed)


def test_a_folder_below_that_is_a_link_out_is_not_entered(place: Place) -> None:
    (place.root / "out").mkdir()
    (place.root / "out" / "checkpoint-1").symlink_to(place.secret)
    place.refused("out")


def test_a_link_within_the_root_is_followed(place: Place) -> None:
    (place.root / "latest").symlink_to("run")
    snapshot = place.root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in (CONFIG_NAME, TENSORS_NAME):
        (snapshot / name).symlink_to(f"../../latest/./{name}")
    assert place.copy("latest") == place.copy("snapshots/abc") == place.copy()


@pytest.mark.parametrize(
    "target", ["../secret", "../../", "../allowed/../secret", "/proc/self/root", "run/../../secret"]
)
def test_a_link_out_of_the_root_is_refused(place: Place, target: str) -> None:
    (place.root / "out").symlink_to(target)
    place.refused("out", SourceNotAllowed)


def test_an_absolute_link_is_refused_even_to_where_it_may(place: Place) -> None:
    (place.root / "out").symlink_to(place.secret)
    place.refused("out", SourceNotAllowed)
    (place.root / "in").symlink_to(place.root / "run")
    place.refused("in", SourceNotAllowed)


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_file_that_is_a_link_out(place: Place, name: str) -> None:
    (place.root / "run" / name).unlink()
    (place.root / "run" / name).symlink_to(place.secret / name)
    place.refused("run", SourceNotAllowed)


def test_links_in_a_circle_end(place: Place) -> None:
    (place.root / "a").symlink_to("b")
    (place.root / "b").symlink_to("a")
    place.refused("a", SourceNotAllowed)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "nothing"])
def test_what_is_no_file_never_waits(place: Place, kind: str) -> None:
    path = place.root / "run" / TENSORS_NAME
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    place.refused("run", SourceNotAllowed if kind == "device" else SourceNotFound)


def test_a_huge_file_is_refused_before_a_byte_is_read(place: Place) -> None:
    os.truncate(place.root / "run" / TENSORS_NAME, 1 << 42)  # it has no bytes on the disk
    place.refused("run", AdapterRefused)
    os.truncate(place.root / "run" / TENSORS_NAME, 0)
    os.truncate(place.root / "run" / CONFIG_NAME, (1 << 20) + 1)
    place.refused("run", AdapterRefused)
    assert place.reserved == []


def test_a_deep_way_does_not_use_up_the_descriptors(place: Place) -> None:
    parts = ["a"] * (MAX_FOLDERS - 1)
    place.write("/".join(parts), b"{}", b"tensors")
    assert place.copy("/".join(parts)) == place.copy()
    place.write("/".join([*parts, "a"]), b"{}", b"tensors")
    place.refused("/".join([*parts, "a"]), SourceNotAllowed)
    (place.root / "up-and-down").symlink_to("/".join(["a", ".."] * MAX_FOLDERS + ["run"]))
    place.refused("up-and-down", SourceNotAllowed)


def test_a_part_of_the_prefix_below_a_tenants_folder_may_not_be_a_link(tmp_path: Path) -> None:
    """The operator made acme's folder, wherever it lies. What is within is acme's to replace."""
    place = Place(tmp_path)
    (place.root / "out").symlink_to(place.secret)
    (tmp_path / "homes").mkdir()
    (tmp_path / "homes" / "acme").symlink_to(place.root)
    place.prefix = f"file://{tmp_path}/homes/{{tenant}}/out"
    place.refused(f"{tmp_path}/homes/acme/out")
    (place.root / "out").unlink()
    (place.root / "run").rename(place.root / "out")
    assert place.copy(f"{tmp_path}/homes/acme/out") == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}


def test_both_files_are_of_one_folder_though_another_takes_its_place(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("next", b"[]", b"others!")
    open_ = os.open

    def exchange(path: str, flags: int, *args: int, **options: int) -> int:
        found = open_(path, flags, *args, **options)
        if path == CONFIG_NAME and not (place.root / "old").exists():
            (place.root / "run").rename(place.root / "old")
            (place.root / "next").rename(place.root / "run")
        return found

    monkeypatch.setattr(os, "open", exchange)
    assert place.copy() == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}
    assert place.copy() == {CONFIG_NAME: b"[]", TENSORS_NAME: b"others!"}


def test_files_of_a_folder_that_is_exchanged_meanwhile_are_those_that_were_opened(place: Place) -> None:
    def exchange(point: FaultPoint, *paths: Path) -> None:
        if point is FaultPoint.RECEIVE_CREATE and not (place.root / "old").exists():
            (place.root / "run").rename(place.root / "old")
            (place.root / "run").symlink_to(place.secret)

    assert place.copy(fault=exchange) == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}


def test_a_file_that_is_written_meanwhile_is_refused(place: Place) -> None:
    def write(point: FaultPoint, *paths: Path) -> None:
        if point is FaultPoint.RECEIVE_WRITE:
            (place.root / "run" / TENSORS_NAME).write_bytes(b"others!")

    with pytest.raises(SourceUnavailable):
        place.copy(fault=write)


def test_a_folder_that_turns_into_a_link_all_the_time_leads_nowhere(place: Place) -> None:
    """The bytes are the tenant's own, or the import is refused."""
    stop = threading.Event()
    spare = place.root / "spare"

    def flip() -> None:
        while not stop.is_set():
            (place.root / "run").rename(spare)
            (place.root / "run").symlink_to("../secret")
            (place.root / "run").unlink()
            spare.rename(place.root / "run")

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(SourceNotFound, SourceNotAllowed, SourceUnavailable):
                assert SECRET not in place.copy().values()
    finally:
        stop.set()
        thread.join()
