"""The Helms that `make chart` fetched."""

from __future__ import annotations

import pytest

from support.chart.helm import Helm, need_helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The newest."""
    return Helm(need_helm()[-1])


@pytest.fixture(scope="session")
def helms() -> list[Helm]:
    """Oldest first."""
    return [Helm(program) for program in need_helm()]
