"""Admission of an adapter: from two untrusted files to a validated AdapterSpec, or a refusal with its reason.

Sites and ranks come from the tensors; the config must agree with them and must not ask for anything that
`peft_support` does not name. Nothing of an upload is executed, compiled or used as a path, and every size is bounded
before work is done for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from loraplex.adapters.admission.config.invocation import check_invocation
from loraplex.adapters.admission.config.token_indices import (
    check_finite_rows,
    check_tied_head,
    check_tied_rows,
    find_token_rows,
)
from loraplex.adapters.admission.experts.checks import ExpertsRead, check_experts, note_untrained, read_upload
from loraplex.adapters.admission.experts.places import ExpertTensors, expert_paths, take_experts
from loraplex.adapters.admission.experts.values import measure_experts
from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.module_names import ModuleNames, names_of
from loraplex.adapters.admission.modules import (
    are_in_parts,
    check_coverage,
    check_embedding,
    check_magnitudes,
    check_modules,
    check_shapes,
    check_tying,
    has_tied_head,
    leave_out_parts,
    note_bare_layers,
    told_left_out,
)
from loraplex.adapters.admission.peft_config import LoraSettings, read_settings
from loraplex.adapters.admission.pooled.heads import (
    HeadTensors,
    check_finite_head,
    find_head,
    take_head,
    told,
)
from loraplex.adapters.admission.tensor_names import AdapterTensors, sort_tensors, unwrap, weight_names
from loraplex.adapters.admission.trained_base import CHECK, compare_bases
from loraplex.adapters.admission.values import (
    check_copies,
    measure_sites,
    note_magnitude_order,
)
from loraplex.adapters.errors import AdapterRefused, ArtifactMissing, RefusalCode
from loraplex.adapters.spec import (
    AdapterSpec,
    BaseSpec,
    ExpertWeights,
    HeadWeights,
    SiteShape,
    SiteWeights,
    TensorSlice,
    TokenRows,
)
from loraplex.adapters.store.files import digest_upload, shown
from loraplex.kernels.lora.site_groups import SITES

_MAX_REPORTED_MODULES = 1024


@dataclass(slots=True)
class _Report:
    """The coverage report of a version, as far as the inspection got. JSON-safe."""

    modules_matched: int = 0
    modules_ignored: int = 0
    parameters: int = 0
    rank_by_module: dict[str, int] = field(default_factory=dict)
    norm: dict[str, Any] | None = None
    base_error: dict[str, Any] | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    step: str = ""
    refused: list[tuple[str, AdapterRefused]] = field(default_factory=list)

    def begin_check(self, step: str) -> None:
        self.step = step

    def done(self, detail: str, *, ok: bool = True) -> None:
        self.checks.append({"name": self.step, "ok": ok, "detail": detail})

    def warn(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.done(f"warning: {note}", ok=False)

    @contextmanager
    def check(self, step: str) -> Iterator[None]:
        """Run a check, and keep its refusal until `end`. A feature is refused once."""
        self.begin_check(step)
        try:
            yield
        except AdapterRefused as refusal:
            known = {fault.feature for _, fault in self.refused} - {None}
            self.refused += [(step, fault) for fault in refusal.faults if fault.feature not in known]

    def end_without(self, *needed: object) -> None:
        """`end`, if one of these could not be read."""
        if any(part is None for part in needed):
            self.end()

    def end(self) -> None:
        """Raise one AdapterRefused for all checks that refused."""
        if any(fault.feature == "experts" for _, fault in self.refused):
            # PEFT writes target_parameters for experts alone; the tensors say so, and which.
            self.refused = [entry for entry in self.refused if entry[1].feature != "target_parameters"]
        self.refused.sort(key=lambda entry: entry[0] != "config")
        for step, fault in self.refused:
            self.begin_check(step)
            self.done(fault.message, ok=False)
        try:
            Faults(fault for _, fault in self.refused).raise_any()
        except AdapterRefused as refusal:
            refusal.report = self.as_dict()
            raise

    def as_dict(self) -> dict[str, Any]:
        return {
            "modules_matched": self.modules_matched,
            "modules_ignored": self.modules_ignored,
            "parameters": self.parameters,
            "rank_by_module": self.rank_by_module,
            "norm": self.norm,
            "checks": self.checks,
            "reference_error": None,
            "base_error": self.base_error,
        }


def inspect_adapter(
    config_path: Path,
    tensors_path: Path,
    base: BaseSpec,
    *,
    max_rank: int,
    deep: bool = True,
    digest: str | None = None,
    earlier: Iterable[dict[str, Any]] = (),
    refuse_towers: bool = False,
) -> AdapterSpec:
    """Validate an adapter against the base. Used for an upload and again when the engine loads it from disk.

    `deep` also reads every value: finiteness, whether there is any effect, the norms of scaling·B·A, and that
    copies of base weights equal the base's. `digest` spares hashing the files where the caller just did. `earlier` are
    entries of the report's `checks` on what was done to the files before. Of a multimodal base, tensors for parts that
    no text goes through are left out, or refused by `refuse_towers`.
    Memory stays below a few chunks of 1 MiB, the header, and one A matrix of max_rank rows.

    The spec's report has `modules_matched`, `modules_ignored` (copies of base weights, and tensors that were left out),
    `parameters`, `rank_by_module` (the first 1024), `norm` ({total, max, max_module, min}, None unless deep),
    `checks` ([{name, ok, detail}], in order; ok is False on a warning and on the check that refused),
    `reference_error` (None here) and `base_error` ({trained_on, served, reason, kl, top1, tokens} of
    `trained_base.BaseError`, the figures None here; None where the config names no other base or form than the served
    one).

    Raises AdapterRefused, which names all that the config and the header show to be wrong, and whose `report` holds
    what was found up to there; ArtifactMissing where a file does not exist; OSError.
    """
    try:
        return _inspect(
            config_path,
            tensors_path,
            base,
            max_rank,
            deep,
            digest,
            _Report(checks=list(earlier)),
            refuse_towers,
        )
    except FileNotFoundError as error:
        raise ArtifactMissing(f"the adapter's file {Path(str(error.filename)).name} is missing") from error


def _inspect(
    config_path: Path,
    tensors_path: Path,
    base: BaseSpec,
    max_rank: int,
    deep: bool,
    digest: str | None,
    report: _Report,
    refuse_towers: bool,
) -> AdapterSpec:
    header: dict[str, TensorSlice] | None = None
    head_tensors: HeadTensors | None = None
    head: HeadWeights | None = None
    names: ModuleNames | None = None
    settings: LoraSettings | None = None
    tensors: AdapterTensors | None = None
    experts, on_experts = ExpertTensors(), ExpertsRead()
    # First: what the config says of modules, it says by the names that the tensors have.
    with report.check("header"):
        header, head_tensors = take_head(unwrap(read_upload(tensors_path, base)))
        names = names_of(weight_names(header), base)
    named = names or names_of((), base)
    by_path = {named.in_file(shape.module_path): shape for shape in base.sites.values()}
    with report.check("config"):
        faults = Faults()
        settings = read_settings(
            config_path,
            [*by_path, *expert_paths(weight_names(header or {}), base, named)],
            faults,
            header or (),
            lambda saved: not refuse_towers and are_in_parts(saved, base, named, thorough=deep),
            has_experts=bool(base.experts),
        )
        faults.raise_any()
        assert settings is not None
        report.done(_kind(settings))
        report.warn(settings.notes)
    if header is not None and names is not None:
        report.begin_check("header")
        report.done(f"{len(header)} tensors")
        with report.check("names"):
            tensors, experts = _sort(header, names, base, report, deep, refuse_towers)
    settings = settings and settings.with_names(named)
    if tensors is not None:
        on_experts = _check_names(tensors, experts, by_path, base, named, settings, max_rank, report)
    report.end_without(settings, tensors)
    assert settings is not None
    assert tensors is not None
    with report.check("head"):
        head = find_head(head_tensors, settings, base)
        if head is not None:
            report.parameters = head.num_parameters
            report.done(told(head))
    sites, tokens = _check_agreement(
        settings, tensors, on_experts, by_path, base, named, max_rank, deep, report
    )
    if tensors.base_copies:
        _check_copies(tensors_path, tensors, base, named, deep, report)
    if deep:
        with report.check("values"):
            _check_values(tensors_path, sites, on_experts.weights, base, report, bool(tokens or head))
            check_finite_rows(tensors_path, tokens)
            check_finite_head(tensors_path, head)
            check_tied_rows(tensors_path, tensors, tokens, named)
            if has_tied_head(settings, tensors, base):
                check_tied_head(tensors_path, sites)
    report.end()
    _note_base_name(settings, base, report)
    return AdapterSpec(
        digest=digest or digest_upload(config_path, tensors_path),
        rank=max({site.rank for site in sites} | on_experts.ranks),
        sites=sites,
        num_bytes=config_path.stat().st_size + tensors_path.stat().st_size,
        targets=(*(name for name in SITES if any(site.site == name for site in sites)), *on_experts.targets),
        tokens=tokens,
        invocation=settings.invocation,
        head=head,
        experts=on_experts.weights,
        report=report.as_dict(),
    )


def _check_copies(
    tensors_path: Path,
    tensors: AdapterTensors,
    base: BaseSpec,
    names: ModuleNames,
    deep: bool,
    report: _Report,
) -> None:
    with report.check("base_weights"):
        check_copies(tensors_path, tensors.base_copies, base, names, deep)
        report.modules_ignored += len(tensors.base_copies)
        report.done(f"{len(tensors.base_copies)} copies of the base's weights were dropped")


def _sort(
    header: dict[str, TensorSlice],
    names: ModuleNames,
    base: BaseSpec,
    report: _Report,
    deep: bool,
    refuse_towers: bool,
) -> tuple[AdapterTensors, ExpertTensors]:
    """Sort the tensors by their purpose, without those that are left out. Those on routed experts come apart."""
    if not refuse_towers:
        header, left_out = leave_out_parts(header, base, names, thorough=deep)
        report.modules_ignored += left_out.total()
        report.warn(told_left_out(left_out))
    found = sort_tensors(header)
    return found, take_experts(found, base, names)


def _kind(settings: LoraSettings) -> str:
    kind = "aLoRA" if settings.invocation else "DoRA" if settings.use_dora else "plain LoRA"
    return kind + (", rank-stabilised scaling" if settings.use_rslora else "")


def _check_names(
    tensors: AdapterTensors,
    experts: ExpertTensors,
    by_path: dict[str, SiteShape],
    base: BaseSpec,
    names: ModuleNames,
    settings: LoraSettings | None,
    max_rank: int,
    report: _Report,
) -> ExpertsRead:
    """Read what lies on experts, and check that all other tensors are of modules that are served."""
    faults_before, on_experts = len(report.refused), ExpertsRead()
    with report.check("experts"):
        on_experts = check_experts(experts, tensors, by_path, base, settings, max_rank)
        if on_experts.weights:
            report.done(on_experts.told)
            report.warn(on_experts.notes)
    with report.check("names"):
        check_modules(tensors, by_path, base, names)
        report.modules_matched = len(tensors.a) + sum(1 for _ in experts.modules())
        report.done(f"{report.modules_matched} modules of the base")
    if len(report.refused) > faults_before:
        report.end()
    return on_experts


def _check_agreement(
    settings: LoraSettings,
    tensors: AdapterTensors,
    on_experts: ExpertsRead,
    by_path: dict[str, SiteShape],
    base: BaseSpec,
    names: ModuleNames,
    max_rank: int,
    deep: bool,
    report: _Report,
) -> tuple[tuple[SiteWeights, ...], tuple[TokenRows, ...]]:
    """Check the config against the tensors: ranks, scaling, magnitudes, tokens, and which modules there are."""
    sites: tuple[SiteWeights, ...] = ()
    tokens: tuple[TokenRows, ...] = ()
    report.begin_check("alpha_pattern")
    _note_overlapping_alphas(settings, list(tensors.a), report)
    with report.check("weight_tying"):
        report.warn(check_tying(settings, tensors, base, names))
    with report.check("shapes"):
        check_embedding(tensors, by_path, settings)
        check_magnitudes(tensors, by_path, settings)
        sites = check_shapes(tensors, by_path, settings, max_rank)
        of_sites = ((base.sites[s.layer, s.site].module_path, s.rank) for s in sites)
        ranks = chain(of_sites, on_experts.rank_by_module(base))
        report.rank_by_module = dict(islice(ranks, _MAX_REPORTED_MODULES))
        stored = [tensor for s in sites for tensor in (s.a, s.b, s.magnitude) if tensor is not None]
        report.parameters += sum(math.prod(tensor.shape) for tensor in stored) + on_experts.num_parameters
        all_ranks = {s.rank for s in sites} | on_experts.ranks
        least, most = min(all_ranks), max(all_ranks)
        report.done(f"rank {most}" if least == most else f"ranks {least} to {most}")
    with report.check("token_rows"):
        tokens = find_token_rows(tensors, settings.token_indices, base, names, tie=settings.ties_weights)
        report.parameters += sum(math.prod(table.rows.shape) for table in tokens)
        for table in tokens:
            report.done(f"{len(table.ids)} rows of {table.module_path}")
    with report.check("invocation"):
        changes_embedding = bool(tensors.looked_up or settings.token_indices)
        check_invocation(
            settings.invocation, base, use_dora=settings.use_dora, changes_embedding=changes_embedding
        )
        if settings.invocation:
            report.done(f"acts from {len(settings.invocation)} invocation tokens on")
    with report.check("coverage"):
        notes = check_coverage(tensors, by_path, settings, base, names, thorough=deep)
        notes += [] if on_experts.weights else note_untrained(settings, base, names, tensors, by_path)
        with_experts = {weights.layer for weights in on_experts.weights}
        notes += note_bare_layers(tensors, with_experts, settings, base, names)
        report.done("tensors came for every module of the base that the config names")
        report.warn(notes)
    report.end()
    return sites, tokens


def _check_values(
    tensors_path: Path,
    sites: tuple[SiteWeights, ...],
    experts: tuple[ExpertWeights, ...],
    base: BaseSpec,
    report: _Report,
    has_more: bool,
) -> None:
    norms, without = measure_experts(tensors_path, experts, base)
    report.norm = measure_sites(tensors_path, sites, base, norms, has_more=has_more)
    report.done("finite, and of effect")
    report.warn([*without, *note_magnitude_order(tensors_path, sites, base)])


def _note_overlapping_alphas(settings: LoraSettings, modules: list[str], report: _Report) -> None:
    """PEFT takes the first key that fits, and sorts the keys when it saves: an adapter can come back from disk
    with another scaling than it was trained with. What counts is what PEFT would load."""
    for module in modules:
        if len(set(settings.alpha_pattern.values(settings.matched_path(module)))) > 1:
            report.warn(
                [
                    f"several keys of alpha_pattern fit {module}; the first in the file counts, as it does when PEFT "
                    "loads the adapter"
                ]
            )
            return


def _note_base_name(settings: LoraSettings, base: BaseSpec, report: _Report) -> None:
    report.begin_check("base_name")
    error = compare_bases(settings.base_name, base)
    if error is not None and not error.is_this_base:
        report.warn([f"the config names the base {shown(settings.base_name)}; only its shapes were compared"])
    elif settings.base_name:
        report.done("the config names this base, or a copy of it in another form")
    else:
        report.done("the config names no base")
    if error is not None:
        report.base_error = error.as_dict()
        if error.is_this_base:
            report.begin_check(CHECK)
            report.warn([error.warning])


def _refuse(code: RefusalCode, message: str, *, feature: str | None = None) -> NoReturn:
    raise AdapterRefused(code, message, feature=feature)
