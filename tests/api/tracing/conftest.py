from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.metrics import Metrics
from loraplex.app.settings import Settings
from loraplex.app.tracing.setup import start_tracing
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.http.otlp_collector import OtlpCollector


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


@pytest.fixture
def traced(tmp_path: Path, collector: OtlpCollector) -> Iterator[Callable[..., DataPlane]]:
    """A data plane that sends its spans to the collector within milliseconds; given settings of traces."""
    with ExitStack() as stack:

        def start(**settings: Any) -> DataPlane:
            given = Settings(**{"otlp_endpoint": collector.url, **settings})
            tracing = start_tracing(given, BASE, Metrics(BASE).traces, delay_ms=5)
            stack.callback(lambda: asyncio.run(tracing.close()))
            return stack.enter_context(running_data_plane(tmp_path, tracing=tracing.requests))

        yield start


@pytest.fixture
def plane(traced: Callable[..., DataPlane]) -> DataPlane:
    """One that records every request."""
    return traced()
