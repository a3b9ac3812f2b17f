"""The data plane and the admin plane, put together around an engine."""

from __future__ import annotations

import contextlib
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from loraplex.adapters.admission.safetensors_header import largest_upload
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.admin.app import (
    admin_routes,
    create_admin_app,
    create_starting_admin_app,
    create_starting_tenant_app,
    create_tenant_app,
    tenant_document,
)
from loraplex.admin.console.routes import console_routes
from loraplex.admin.runtime_loading import RuntimeLoading
from loraplex.admin.services import AdminServices
from loraplex.api.application import create_data_app, create_starting_data_app, service_probes
from loraplex.api.batches.lines import Lines
from loraplex.api.deps import ApiServices
from loraplex.api.drain import Drain
from loraplex.api.generation.shadow import Shadows
from loraplex.api.in_process import PromptScorer
from loraplex.api.metrics import Metrics, Scraper
from loraplex.api.routes.metrics import metrics_route
from loraplex.api.routes.probes import probe_routes
from loraplex.app.base_model.output_formats import base_formats, check_named_formats
from loraplex.app.base_model.own_chats import ChatExaminer, OwnChatsOfVersions
from loraplex.app.base_model.source import cache_dir, kept_dir
from loraplex.app.installation import Installation
from loraplex.app.setting_types import ANY_ADDRESS, kv_disk, server_limits
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.app.storage.disk import data_room
from loraplex.app.storage.redis import make_limiter
from loraplex.control.audit.log import AuditLog
from loraplex.control.batches.batches import Batches
from loraplex.control.batches.files import Files
from loraplex.control.batches.work import BatchWork
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.series import AllSeries
from loraplex.control.catalog.shadow_store import ShadowStore
from loraplex.control.flushes import Flushes
from loraplex.control.history.history import History
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.limiter import Limiter
from loraplex.control.limits.service import RequestLimits
from loraplex.control.recent_requests import RecentRequests
from loraplex.control.types import Principal, VersionInfo
from loraplex.control.usage.overview import Overviews
from loraplex.http.routing import exact
from loraplex.lifecycle.agreement_checks import AgreementChecks, Score
from loraplex.lifecycle.base_errors import BaseErrors, ServedBase
from loraplex.lifecycle.batches.runner import BatchRunner
from loraplex.lifecycle.durability import Durability
from loraplex.lifecycle.eviction import SurplusRemoval
from loraplex.lifecycle.needs.disks import Folder
from loraplex.lifecycle.version_checks import VersionChecks
from loraplex.serving.engines.engines import Engines
from loraplex.serving.grammar.checker import GrammarChecker
from loraplex.serving.templates.renderer import TemplateRenderer
from loraplex.serving.text.processor import TextProcessor
from loraplex.serving.text.text_build import text_build

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.app.tracing.setup import Tracing


TENANT_CONSOLE = "/console"
"""The console's page on the data port; on the admin port it is at `/`."""


def create_starting_apps(installation: Installation, engine: Engines) -> tuple[ASGIApp, ASGIApp]:
    """The data plane and the admin plane until the engine has been started: probes, metrics, and a 503 for the rest."""
    name = installation.served_name
    metrics = Metrics(name)
    metrics.watch_background(installation.background)
    routes: list[BaseRoute] = [
        *probe_routes(engine, Drain(), serving=False, in_document=False),
        metrics_route(Scraper(metrics, engine), in_document=False),
        *console_routes("/"),
    ]
    data = create_starting_data_app(
        engine,
        name,
        extra_routes=[_tenant_mount(create_starting_tenant_app()), *console_routes(TENANT_CONSOLE)],
    )
    return data, create_starting_admin_app(routes)


def _written_directories(settings: Settings) -> dict[str, Path]:
    """Folders by what they hold."""
    found = {"data": settings.data_dir, "artifacts": artifact_dir(settings)}
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        found["cache"] = cache_dir()
    return found


def _folders(installation: Installation) -> list[Folder]:
    """Folders that the server writes to, with the room that the doctor wants on their disks."""
    settings, base = installation.settings, installation.validation.base
    upload = 2 * largest_upload(settings.max_adapter_upload, base)
    found = [
        Folder("data", settings.data_dir, data_room(settings)[0]),
        Folder("adapters", artifact_dir(settings), upload),
    ]
    if settings.kv_disk:
        disk = kv_disk(settings.kv_disk)
        found.append(Folder("prefixes", Path(disk.directory), max(1, settings.replicas) * disk.num_bytes))
    return found


def _tenant_mount(app: ASGIApp) -> BaseRoute:
    """Where the tenants' admin routes are on the data port."""
    return exact(Mount("/admin/v1", app))


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that both planes use, or that begin and end with the server."""

    engine: Engines
    metrics: Metrics
    history: History
    drain: Drain
    limiter: Limiter
    limits: RequestLimits
    text: TextProcessor
    templates: TemplateRenderer
    grammars: GrammarChecker
    shadows: Shadows
    files: Files
    recent: RecentRequests
    tracing: Tracing | None


@dataclass(frozen=True, slots=True)
class Apps:
    """The two planes of a server, and what drives their beginning and end."""

    data: ASGIApp
    admin: ASGIApp
    checks: VersionChecks
    durability: Durability | None
    batches: BatchRunner
    shared: Shared


def create_apps(installation: Installation, engine: Engines) -> Apps:
    """The data plane and the admin plane around an engine that has been started."""
    shared = _shared(installation, engine)

    async def score(who: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        # The data plane loads adapters by the admin plane, which scores by the data plane.
        return await scorer(who, info, prompts)

    admin_services = _admin_services(installation, shared, score)
    data_services = _data_services(installation, shared, admin_services)
    scorer = PromptScorer(data_services)
    operator_routes: list[BaseRoute] = [
        *service_probes(data_services, in_document=False),
        metrics_route(Scraper(shared.metrics, engine), in_document=False),
        *console_routes("/"),
    ]
    return Apps(
        data=create_data_app(
            data_services,
            extra_routes=[_tenant_mount(create_tenant_app(admin_services)), *console_routes(TENANT_CONSOLE)],
            extra_document=tenant_document,
        ),
        admin=create_admin_app(admin_services, extra_routes=operator_routes),
        checks=admin_services.checks,
        durability=admin_services.durability,
        batches=BatchRunner(
            BatchWork(installation.database, uuid.uuid4().hex),
            Lines(data_services),
            installation.database.run,
            stopping=lambda: shared.drain.draining,
        ),
        shared=shared,
    )


def _shared(installation: Installation, engine: Engines) -> Shared:
    settings, tasks, model_dir = installation.settings, installation.background, installation.model_dir
    metrics = _metrics(installation)
    limiter = make_limiter(settings, metrics.limiter, tasks)
    budgets = Budgets(BudgetStore(installation.database), installation.database.run)
    tracing = None
    if settings.otlp_endpoint:
        # Only here, so that a server without traces does not import OpenTelemetry.
        from loraplex.app.tracing.setup import start_tracing

        tracing = start_tracing(settings, installation.served_name, metrics.traces)
    warn = structlog.get_logger("loraplex").warning
    text, drain = TextProcessor(model_dir, max_model_len=engine.info.max_model_len), Drain()
    store, run = ShadowStore(installation.database), installation.database.run
    return Shared(
        engine=engine,
        metrics=metrics,
        history=History(platform.node()),
        drain=drain,
        limiter=limiter,
        limits=RequestLimits(limiter, budgets, server=server_limits(settings.server_limit), background=tasks),
        text=text,
        templates=TemplateRenderer(str(model_dir), max_model_len=engine.info.max_model_len, log=warn),
        grammars=GrammarChecker(
            str(model_dir),
            eos_ids=engine.info.eos_ids,
            on_check=metrics.grammars.checked,
            log=warn,
        ),
        shadows=Shadows(engine, text, drain, store, run, metrics.shadows),
        files=Files(installation.database),
        recent=RecentRequests(),
        tracing=tracing,
    )


def _metrics(installation: Installation) -> Metrics:
    metrics = Metrics(installation.served_name, residency=installation.settings.residency_metrics)
    health = installation.database_health
    metrics.database_up.set_function(lambda: 0.0 if health.warning() else 1.0)
    metrics.database_outage.set_function(lambda: health.outage_s)
    metrics.watch_background(installation.background)
    metrics.watch_disks(_written_directories(installation.settings))
    metrics.expect_changes(route.action for route in admin_routes() if route.action is not None)
    metrics.watch_usage(installation.usage_journal, installation.usage_writer)
    metrics.durability.lost(installation.num_lost)
    return metrics


def _admin_services(installation: Installation, shared: Shared, score: Score) -> AdminServices:
    settings, engine, metrics = installation.settings, shared.engine, shared.metrics
    surplus = SurplusRemoval(
        database=installation.database,
        catalog=installation.catalog,
        engine=engine,
        retention=Retention(installation.database, installation.artifacts, settings.keep_versions),
    )
    base_errors = BaseErrors(
        database=installation.database,
        validation=installation.validation,
        store=installation.store,
        served=_served_base(settings, shared.text),
    )
    checks = VersionChecks(
        database=installation.database,
        catalog=installation.catalog,
        validation=installation.validation,
        tenants=installation.tenants,
        store=installation.store,
        engine=engine,
        agreements=AgreementChecks(installation.database, engine, score, metrics.agreement),
        surplus=surplus,
        base_errors=base_errors,
        on_outcome=metrics.version_checked,
    )
    return AdminServices(
        database=installation.database,
        tenants=installation.tenants,
        keys=installation.keys,
        key_cache=installation.key_cache,
        catalog=installation.catalog,
        releases=installation.releases,
        series=AllSeries(installation.database, installation.catalog.check_name),
        artifacts=installation.artifacts,
        audit=AuditLog(installation.database),
        overviews=Overviews(installation.database, installation.catalog.base.fingerprint),
        recent=shared.recent,
        engine=engine,
        history=shared.history,
        sources=AllowedSources(settings.adapter_sources),
        surplus=surplus,
        durability=_durability(installation, metrics),
        checks=checks,
        max_upload_bytes=largest_upload(settings.max_adapter_upload, installation.validation.base),
        data_url=_data_url(settings),
        folders=_folders(installation),
        on_change=metrics.admin_changed,
        on_push=metrics.durability.pushed,
        on_agreement=metrics.agreement.compared,
        score=score,
        check_formats=partial(check_named_formats, shared.text),
        examine_chat=ChatExaminer(
            shared.text, engine.info.eos_ids, shared.templates, own_serves=_owns_serve(settings)
        ),
    )


def _durability(installation: Installation, metrics: Metrics) -> Durability | None:
    """None where a push must be durable before it serves: in a bucket, and where engines of other machines read it."""
    if not isinstance(installation.store, ArtifactStore) or installation.settings.engine_address[1]:
        return None
    flushes = Flushes(installation.database, installation.store)
    durability = Durability(installation.database, flushes, metrics.durability)
    metrics.durability.watch(lambda: durability.num_waiting)
    return durability


def _data_url(settings: Settings) -> str | None:
    """The URL of the data plane for browsers. None if it listens on every address, or on whichever port is free."""
    host, port = settings.host, settings.port
    if settings.public_url or host in ANY_ADDRESS or port == 0:
        return settings.public_url or None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _served_base(settings: Settings, text: TextProcessor) -> ServedBase:
    folder = settings.data_dir.resolve()
    return ServedBase(
        text.encode, settings.max_model_len, cache_dir=folder, plan_dir=kept_dir("plans", folder)
    )


def _data_services(installation: Installation, shared: Shared, admin_services: AdminServices) -> ApiServices:
    settings, engine, tracing = installation.settings, shared.engine, shared.tracing
    own_chats = OwnChatsOfVersions(installation.database, installation.catalog, shared.templates)
    return ApiServices(
        text_build=text_build(installation.model_dir),
        engine=engine,
        text=shared.text,
        formats=base_formats(settings, shared.text),
        own_chats=own_chats if _owns_serve(settings) else None,
        grammars=shared.grammars,
        authenticator=installation.key_cache,
        resolver=installation.resolver,
        limiter=shared.limits,
        ledger=installation.usage_journal,
        running_arms=installation.running_arms,
        adapters=RuntimeLoading(admin_services),
        metrics=shared.metrics,
        history=shared.history,
        drain=shared.drain,
        shadows=shared.shadows,
        recent=shared.recent,
        served_model_name=installation.served_name,
        max_model_len=engine.info.max_model_len,
        default_max_tokens=settings.default_max_tokens,
        max_body=settings.max_body,
        cors_origins=tuple(settings.cors_origins),
        metrics_on_data_port=settings.metrics_on_data_port,
        database=installation.database,
        files=shared.files,
        batches=Batches(installation.database),
        database_health=installation.database_health,
        usage_failure=installation.usage_journal.failure,
        limits_warning=shared.limiter.warning,
        tracing=None if tracing is None else tracing.requests,
    )


def _owns_serve(settings: Settings) -> bool:
    """Whether versions' own chat templates are used."""
    return settings.adapter_templates == "own"
