"""Where engines cache what they read from configs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from loraplex.app.base_model.source import kept_dir


def test_servers_of_a_user_share_it_and_it_is_nobody_elses(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = kept_dir("plans", tmp_path / "data")
    assert shared == kept_dir("plans", tmp_path / "other")
    assert shared.is_relative_to(tmp_path / "cache")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700


@pytest.mark.parametrize("home", ["/dev/null", ""])
def test_data_directory_replaces_an_unwritable_user_cache(home: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home or str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert kept_dir("plans", tmp_path / "data") == tmp_path / "data"
