"""The collector while a process imports, and behind that."""

from __future__ import annotations

import gc

import pytest

from loraplex.engine.ipc.quick_imports import quick_imports


def test_nothing_is_collected_in_the_block_nor_looked_at_behind_it() -> None:
    with quick_imports():
        assert not gc.isenabled()
        made: list[object] = [[]]
    assert gc.isenabled()
    assert not any(one is made for one in gc.get_objects())
    later: list[object] = [[]]
    assert any(one is later for one in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), quick_imports():
        import loraplex.engine.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
