"""What the fake engine measures of a version: what the reference expects of its files, unless it is told else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.numerics.reference import expect_site
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from loraplex.serving.errors import ServingError


class FakeMeasure:
    """`scale` is what the outputs are multiplied by: 1.0 is right. While `is_held` a measurement waits; `error` is
    raised in place of one. `measured` are the versions that were asked for, in order."""

    def __init__(self, path: Callable[[str], Path], base: BaseSpec) -> None:
        self._path = path
        self._base = base
        self.scale = 1.0
        self.error: ServingError | None = None
        self.measured: list[str] = []
        self.tenants: list[str] = []
        self.num_running = self.most_running = 0
        self._free = asyncio.Event()
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def __call__(self, ref: AdapterRef) -> SiteOutputs:
        self.measured.append(f"{ref.name}@v{ref.version}")
        self.tenants.append(ref.tenant_id)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._free.wait()
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return self._outputs(ref.digest)

    def _outputs(self, digest: str) -> SiteOutputs:
        folder = self._path(digest)
        upload = Upload(folder / CONFIG_NAME, folder / TENSORS_NAME, self._base)
        sums = np.stack([expect_site(upload.read(*key), "float32", None).sums for key in upload.sites])
        with np.errstate(invalid="ignore"):  # 0 times infinity
            packed = (sums * self.scale).astype("<f4").tobytes()
        finite = bytes([math.isfinite(self.scale)]) * len(sums)
        return SiteOutputs("float32", tuple(upload.sites), packed, finite)
