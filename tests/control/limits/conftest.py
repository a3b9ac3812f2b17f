"""Fixtures of the limiters' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.control.limiters import SharedLimits


@pytest.fixture
async def shared() -> AsyncIterator[SharedLimits]:
    async with SharedLimits() as limits:
        yield limits
