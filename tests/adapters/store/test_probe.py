"""The object by which two processes find out whether they use one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.errors import ArtifactMissing
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.probe import read_probe, write_probe


def test_whoever_reads_the_store_knows_its_content(tmp_path: Path) -> None:
    writer, reader = ArtifactStore(tmp_path / "one"), ArtifactStore(tmp_path / "one")
    probes = [write_probe(writer) for _ in range(2)]
    assert [read_probe(reader, probe.digest) for probe in probes] == [probe.content for probe in probes]
    assert probes[0] != probes[1]


def test_another_store_has_none(tmp_path: Path) -> None:
    probe = write_probe(ArtifactStore(tmp_path / "one"))
    with pytest.raises(ArtifactMissing):
        read_probe(ArtifactStore(tmp_path / "two"), probe.digest)


def test_a_sweep_removes_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "one")
    probe = write_probe(store)
    assert store.sweep(set()).artifacts_removed == (probe.digest,)
