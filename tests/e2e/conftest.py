"""Servers that tests of one session share. Tests that hurt a server start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    SMALL,
    TINY_SIZES,
    TINY_TORCH,
    LiveServer,
    Shop,
    write_tiny_adapter,
    write_tiny_model,
)


@pytest.fixture(scope="session")
def real(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The real model with the three shipped adapters. In float32, where an answer cannot depend on the batch by a
    rounding; the soak and the fault drills run in the model's own bfloat16."""
    data_dir = tmp_path_factory.mktemp("real") / "data"
    with LiveServer(
        real_model_dir, data_dir, served_model_name=SERVED_NAME, dtype="float32", **SMALL
    ) as server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        yield Shop(server, server.create_key("acme"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model") / "tiny")


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapter(tmp_path_factory.mktemp("tiny-adapter") / "a")


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tiny_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A model of a few kilobytes with one adapter, "a"; thousands of tokens a second and room for long answers."""
    with LiveServer(
        tiny_model, tmp_path_factory.mktemp("tiny") / "data", dtype="float32", **TINY_SIZES
    ) as server:
        server.create_tenant("acme")
        server.upload("acme", "a", tiny_adapter)
        yield Shop(server, server.create_key("acme"))


@pytest.fixture(scope="session")
def spoken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Versions speak as they say: with their own chat templates, and calls in the format of each, JSON where it names
    none. A file has a tenant of its own."""
    data_dir = tmp_path_factory.mktemp("spoken") / "data"
    with LiveServer(
        tiny_model, data_dir, tool_format="json", adapter_templates="own", **TINY_TORCH
    ) as server:
        yield server
