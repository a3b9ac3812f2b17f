"""Measuring of an adapter's sites behind a forward pass, or without one."""

from __future__ import annotations

from loraplex.adapters.numerics import SiteOutputs
from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.riders.site_probe import SiteProbe, SiteSums
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.types import MeasuredPart


class MeasuredSites(Rider):
    """The outputs of one part of a MeasureRequest."""

    def __init__(self, probe: SiteProbe, part: MeasuredPart) -> None:
        self._probe = probe
        self._part = part
        self._sums: SiteSums | None = None

    def compute(self, forward: Forward) -> None:
        self._sums = self._probe.measure(self._part)

    def to_host(self, copy: Copy) -> None:
        if self._sums is not None:
            found, experts = self._sums, self._sums.experts.with_copies(copy)
            self._sums = SiteSums(found.sites, copy(found.sums), copy(found.finite), experts)

    def collect(self, result: StepResult) -> None:
        if self._sums is not None:
            sums, finite = self._sums.sums.numpy().tobytes(), bytes(self._sums.finite.tolist())
            experts = self._sums.experts
            result.measured = SiteOutputs(
                self._probe.dtype,
                self._sums.sites,
                sums,
                finite,
                expert_sites=experts.sites,
                expert_sums=experts.sums.numpy().tobytes(),
                expert_finite=bytes(experts.finite.tolist()),
            )
