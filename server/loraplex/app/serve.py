"""`loraplex serve`: an engine process, two HTTP ports, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
import uuid
from functools import partial

import structlog
import uvloop

from loraplex.adapters.errors import LoraplexError
from loraplex.app.cluster.choice import cluster_spec, uses_ray
from loraplex.app.cluster.ray_replicas import RayReplicas
from loraplex.app.engine_settings import engine_config
from loraplex.app.engines.logs import engine_rules
from loraplex.app.engines.port import listen_for_engines
from loraplex.app.installation import Installation, prepare
from loraplex.app.logs import configure_logging, log_everything
from loraplex.app.planes import Apps, Shared, create_apps, create_starting_apps
from loraplex.app.ports.sockets import Ports, address, open_ports, url
from loraplex.app.ports.swappable_app import Listening
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.stop_signals import StopSignals
from loraplex.app.storage.disk import full_data_dir
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.usage.roll_up import UsageRollUp
from loraplex.control.usage.running_arms import RunningArmsWriter
from loraplex.lifecycle.catalog_watch import CatalogWatch
from loraplex.lifecycle.damage_reports import DamageReports
from loraplex.lifecycle.releases.rounds import Rounds
from loraplex.lifecycle.releases.task import ReleaseTask, ReleaseWatch, WebhookTask
from loraplex.lifecycle.releases.webhook import Webhook
from loraplex.lifecycle.releases.webhook_address import AllowedHosts
from loraplex.lifecycle.tenant_terms import TermsSender
from loraplex.lifecycle.warming import Warming
from loraplex.serving.demand import Demand
from loraplex.serving.dialling.members import Members
from loraplex.serving.dialling.remote import RemoteEngine
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.engines.replica import Replica

LAST_EVENTS_S = 2.0
"""How long a client may take to read why its answer was cut."""


def serve(settings: Settings) -> int:
    """Run until a signal; the exit code. 0 after a drain, 1 where a port broke.

    Raises LoraplexError, which says in one line why the start failed."""
    configure_logging(settings.log_level)
    log_everything()
    log = structlog.get_logger("loraplex")
    if not settings.replicas and not settings.engine_address[1]:
        raise SettingsInvalid(
            "--replicas 0 starts no engine: give --engine-port too, for engines that dial in."
        )
    if settings.webhook_url and not settings.webhook_secret:
        raise SettingsInvalid("--webhook-url needs --webhook-secret, which signs what is sent there.")
    by_ray, why = uses_ray(settings)
    if settings.replicas > 1 or by_ray:
        log.info("engines_managed", manager="ray" if by_ray else "local", reason=why)
    with open_ports(settings, engines_dial=by_ray) as ports:
        try:
            installation = prepare(settings, lambda line: log.info("preparing", step=line))
        except (OSError, DatabaseUnavailable) as error:
            reason = full_data_dir(error, settings)
            if reason is None and not isinstance(error, OSError):
                raise
            raise SettingsInvalid(f"the server cannot start: {reason or f'{error}.'}") from error
        try:
            if installation.new_admin_token is not None:
                _show_token(installation)
            return uvloop.run(_serve(installation, ports, by_ray=by_ray))
        finally:
            installation.close()


def _show_token(installation: Installation) -> None:
    path = installation.settings.data_dir / "admin-token"
    print(f"admin token (kept in {path}, shown this once): {installation.new_admin_token}", file=sys.stderr)


async def _serve(installation: Installation, ports: Ports, *, by_ray: bool) -> int:
    settings = installation.settings
    stop = StopSignals()
    with stop.installed():
        damage = DamageReports(installation.database, installation.catalog)
        demand = Demand()
        warming = Warming(
            settings.data_dir.resolve(),
            demand,
            database=installation.database,
            catalog=installation.catalog,
            releases=installation.releases,
            tenants=installation.tenants,
        )
        local = [] if by_ray else local_replicas(installation, damage, demand)
        engine = Engines(local, num_wanted=settings.replicas, engines_dial=bool(ports.engine))
        # The ports first: clients can distinguish a starting server from none, and get their answer at once.
        data, admin = create_starting_apps(installation, engine)
        listening = Listening(ports, data=data, admin=admin)
        at_end = contextlib.AsyncExitStack()
        at_end.push_async_callback(engine.close)
        at_end.push_async_callback(installation.background.close)
        async with at_end:
            joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if ports.engine:
                dialled = engines_port(installation, ports, engine, damage, demand, joined)
                await at_end.enter_async_context(dialled)
            if by_ray:
                replicas = RayReplicas(
                    cluster_spec(settings, address(ports.engine)),
                    engine,
                    settings.drain_timeout,
                    on_unusable=partial(_fail, joined),
                )
                installation.background.start("ray", replicas.run)
            elif settings.replicas:
                joined.set_result(None)
            start_background(installation, engine, damage, warming)
            installation.background.start("placement", engine.place_adapters)
            installation.background.start("service-exchange", engine.exchange_service)
            try:
                code = await _serve_on(listening, installation, ports, engine, warming, stop, at_end, joined)
            finally:
                whole = await listening.close()
        return code if whole else 1


async def _serve_on(
    listening: Listening,
    installation: Installation,
    ports: Ports,
    engine: Engines,
    warming: Warming,
    stop: StopSignals,
    at_end: contextlib.AsyncExitStack,
    joined: asyncio.Future[None],
) -> int:
    log = structlog.get_logger("loraplex")
    stopping = stop.first_task()
    started = asyncio.create_task(_start(installation, engine, warming, at_end, joined))
    try:
        await asyncio.wait({started, stopping, *listening.tasks}, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            apps = started.result()
            listening.switch(data=apps.data, admin=apps.admin)
            log.info(
                "serving",
                model=installation.served_name,
                data=url(ports.data),
                admin=url(ports.admin),
                device=engine.info.device,
                dtype=engine.info.dtype,
                decoder=engine.info.decoder,
                kv_blocks=engine.info.num_kv_blocks,
                max_model_len=engine.info.max_model_len,
            )
            await asyncio.wait({*listening.tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            log.error("port_failed", reason=listening.failure)
            return 1
        if started.done():
            await _drain(installation.settings, apps.shared, engine, stop)
        return 0
    finally:
        stopping.cancel()
        if not started.done():
            started.cancel()
            with contextlib.suppress(asyncio.CancelledError, LoraplexError):
                await started


def local_replicas(installation: Installation, damage: DamageReports, demand: Demand) -> list[Replica]:
    """The engines that start with the server, on this machine."""
    settings = installation.settings
    replicas = []
    for number in range(settings.replicas):
        name = f"replica-{number + 1}"
        rules = engine_rules(name if settings.replicas > 1 else None, keep_spare=settings.engine_spare)
        config = engine_config(settings, installation.model_dir, installation.served_name, number)
        session = LocalEngine(config, rules, on_damaged=damage.put, demand=demand)
        replicas.append(Replica(name, session, platform.node()))
    return replicas


def engines_port(
    installation: Installation,
    ports: Ports,
    engine: Engines,
    damage: DamageReports,
    demand: Demand,
    joined: asyncio.Future[None],
) -> contextlib.AbstractAsyncContextManager[Members]:
    """The port that engines dial. `joined` is done with the first of them."""

    def on_join(replica: str, node: str, session: RemoteEngine) -> None:
        engine.join(Replica(replica, session, node))
        if not joined.done():
            joined.set_result(None)

    return listen_for_engines(
        installation.settings,
        ports.engine,
        installation.store,
        installation.catalog.base.fingerprint,
        on_join=on_join,
        on_leave=engine.leave,
        on_damaged=damage.put,
        taken=[replica.id for replica in engine.replicas],
        demand=demand,
    )


def start_background(
    installation: Installation, engine: Engines, damage: DamageReports, warming: Warming
) -> None:
    """Start what runs beside the requests; the limits start theirs themselves. Call on the event loop. All of it ends
    with `installation.background`."""
    database, tasks = installation.database, installation.background
    tasks.watch(installation.usage_journal.state)
    tasks.start("key-use", installation.key_use.run)
    tasks.start("usage-writer", installation.usage_writer.run)
    running = RunningArmsWriter(database, installation.running_arms, installation.usage_journal.life)
    tasks.start("running-arms", running.run)
    tasks.start("usage-roll-up", UsageRollUp(database, installation.settings.usage_keep_days).run)
    tasks.start("database-watch", database.watch)
    tasks.start("damage-reports", partial(damage.run, engine))
    tasks.start("adapter-demand", warming.run)
    tasks.start("terms-watch", partial(TermsSender(database, installation.tenants).run, engine))


async def _start(
    installation: Installation,
    engine: Engines,
    warming: Warming,
    at_end: contextlib.AsyncExitStack,
    joined: asyncio.Future[None],
) -> Apps:
    await engine.start()
    await asyncio.shield(joined)
    await warming.pin(engine)
    apps = create_apps(installation, engine)
    shared = apps.shared
    if shared.tracing is not None:
        at_end.push_async_callback(shared.tracing.close)
    at_end.push_async_callback(shared.limits.close)
    await shared.limits.start()
    at_end.push_async_callback(shared.templates.close)
    if installation.settings.adapter_templates == "own":
        shared.templates.start()
    at_end.push_async_callback(shared.grammars.close)
    shared.grammars.start()
    await warming.begin(engine)
    installation.background.start("version-checks", apps.checks.run)
    if apps.durability is not None:
        installation.background.start("durability", apps.durability.run)
        at_end.push_async_callback(apps.durability.finish)
    installation.background.start("shadows", shared.shadows.run)
    installation.background.start("files", shared.files.run)
    installation.background.start("batches", apps.batches.run)
    watch = CatalogWatch(installation.database, installation.catalog, installation.tenants)
    installation.background.start("catalog-watch", partial(watch.run, engine))
    start_releases(installation, engine, shared.metrics.releases)
    return apps


def start_releases(installation: Installation, engine: Engines, watch: ReleaseWatch) -> None:
    """Start this server's part in watched releases, and in what their webhook is told."""
    settings, database = installation.settings, installation.database
    rounds = Rounds(database, uuid.uuid4().hex, announces=bool(settings.webhook_url))
    task = ReleaseTask(rounds, database, installation.releases, watch)
    installation.background.start("releases", partial(task.run, engine))
    if settings.webhook_url:
        allowed = AllowedHosts(settings.webhook_allow)
        webhook = Webhook(settings.webhook_url, settings.webhook_secret, allowed)
        installation.background.start("release-webhook", WebhookTask(rounds, database, webhook).run)


def _fail(joined: asyncio.Future[None], error: LoraplexError) -> None:
    if not joined.done():
        joined.set_exception(error)


async def _drain(settings: Settings, shared: Shared, engine: Engines, stop: StopSignals) -> None:
    """Drain as docs/operations.md says of SIGTERM; a second signal cuts it short."""
    log = structlog.get_logger("loraplex")
    log.info("draining", in_flight=shared.drain.in_flight, grace_s=settings.drain_grace)
    shared.metrics.draining.set(1)
    draining = asyncio.create_task(shared.drain.run(settings.drain_grace, settings.drain_timeout))
    second = stop.second_task()
    await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
    finished = draining.done() and draining.result()
    for task in (draining, second):
        task.cancel()
    log.info("drained", finished=finished, cut=shared.drain.in_flight)
    if not finished:
        # The engine's end is an error event of each stream: the event loop must live until they are written.
        await engine.close()
        await shared.drain.wait_idle(LAST_EVENTS_S)
