"""Reading from a bucket, over real HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.adapters.sources.copy import copy_source
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from support.servers.s3_server import BUCKET, S3Server

FILES = {CONFIG_NAME: b"{}", TENSORS_NAME: os.urandom(3 << 20)}


@pytest.fixture(autouse=True)
def variables(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    store = s3.store("checkpoints/run")
    for name, content in FILES.items():
        obstore.put(store, name, content)


def copy(
    tmp_path: Path,
    path: str = "checkpoints/run",
    max_bytes: int = 8 << 20,
    reserve: Callable[[int], None] = lambda _: None,
) -> dict[str, bytes]:
    allowed = AllowedSources([f"s3://{BUCKET}/checkpoints", f"s3://{BUCKET}/of/{{tenant}}"])
    source = allowed.allow(f"s3://{BUCKET}/{path}", "acme")
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        copy_source(source, staging, max_bytes=max_bytes, reserve=reserve)
        return {path.name: path.read_bytes() for path in staging.directory.iterdir()}


def refused(tmp_path: Path, kind: type[LoraplexError], path: str = "checkpoints/run", **options: Any) -> str:
    with pytest.raises(kind) as caught:
        copy(tmp_path, path, **options)
    assert list((tmp_path / "store" / "staging").iterdir()) == []
    return caught.value.message


def test_both_objects(tmp_path: Path) -> None:
    assert copy(tmp_path) == FILES


def test_what_it_has_for_its_chats_comes_too(tmp_path: Path, s3: S3Server) -> None:
    store = s3.store("checkpoints/chat")
    files = FILES | {"generation_config.json": b'{"eos_token_id": 7}'}
    for name, content in files.items():
        obstore.put(store, name, content)
    assert copy(tmp_path, "checkpoints/chat") == files


def test_an_object_that_is_missing(tmp_path: Path, s3: S3Server) -> None:
    assert CONFIG_NAME in refused(tmp_path, SourceNotFound, "checkpoints/half")
    obstore.put(s3.store("checkpoints/half"), CONFIG_NAME, b"{}")
    assert TENSORS_NAME in refused(tmp_path, SourceNotFound, "checkpoints/half")


def test_the_tensors_under_the_name_that_mlx_gives_them(tmp_path: Path, s3: S3Server) -> None:
    store = s3.store("checkpoints/mlx")
    obstore.put(store, CONFIG_NAME, b"{}")
    obstore.put(store, "adapters.safetensors", b"tensors")
    assert copy(tmp_path, "checkpoints/mlx") == {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors"}


def test_pickled_weights_alone_are_named_with_their_conversion(tmp_path: Path, s3: S3Server) -> None:
    store = s3.store("checkpoints/pickled")
    obstore.put(store, CONFIG_NAME, b"{}")
    obstore.put(store, "adapter_model.bin", b"x")
    assert "torch.load(" in refused(tmp_path, AdapterRefused, "checkpoints/pickled")


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    refused(tmp_path, AdapterRefused, max_bytes=1 << 20)


def test_an_object_that_is_replaced_meanwhile_is_not_read(tmp_path: Path, s3: S3Server) -> None:
    """By one of the same length, between the look at its size and the read."""

    def replace(_: int) -> None:
        obstore.put(s3.store("checkpoints/run"), TENSORS_NAME, bytes(len(FILES[TENSORS_NAME])))

    refused(tmp_path, SourceUnavailable, reserve=replace)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{BUCKET}/others/run",
        f"s3://{BUCKET}/checkpoints/../others",
        f"s3://{BUCKET}/checkpoints%2f..%2fothers",
        f"s3://{BUCKET}/of/rival/run",
        "s3://another-bucket/checkpoints/run",
        f"s3://key:secret@{BUCKET}/checkpoints/run",
        f"s3://{BUCKET}:9000/checkpoints/run",
        f"s3://{BUCKET}/checkpoints/run?versionId=1",
        "s3:///checkpoints/run",
    ],
)
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(SourceNotAllowed):
        AllowedSources([f"s3://{BUCKET}/checkpoints", f"s3://{BUCKET}/of/{{tenant}}"]).allow(url, "acme")


def test_an_endpoint_that_is_away_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("loraplex.adapters.sources.bucket.RETRY_S", 0.2)
    message = refused(tmp_path, SourceUnavailable)
    assert "127.0.0.1" not in message
    assert "testing" not in message
