"""The control plane's rules over a real database, a real store and a tiny base; no HTTP and no engine."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.control.artifacts import Artifacts
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.releases import Releases
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import AS_THE_BASE, Principal, Removal, Serving, VersionInfo
from loraplex.migrations.run import upgrade
from support.adapters.drafts import TinyBase, make_adapter, write_base
from support.control.integrity import check_integrity

ADMIN_TOKEN = "lpx-admin-for-tests"
PEPPER = bytes(range(32))
ARCH = TinyBase(layers=1)
SERVED_NAME = "org/tiny"


@dataclass
class FakeClock:
    """Monotonic seconds and a time of day, both moved by hand."""

    seconds: float = 0.0
    epoch: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.epoch + self.seconds, UTC)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """A migrated database that is copied: migrating takes longer than most tests. It lives as long as the process."""
    made = tempfile.TemporaryDirectory(prefix="loraplex-tests-")
    upgrade(f"sqlite:///{made.name}/control.db")
    return made


def use_database(root: Path, url: str) -> None:
    """The planes of `root` use this database, which has the schema; without it, a SQLite file of their own."""
    (root / "database-url").write_text(url)


def database_url(root: Path) -> str:
    chosen = root / "database-url"
    if chosen.exists():
        return chosen.read_text()
    path = root / "control.db"
    if not path.exists():
        shutil.copyfile(Path(_template().name) / "control.db", path)
    return f"sqlite:///{path}"


@dataclass
class ControlPlane:
    """`root` holds the store, the base, and the database or where that is (`use_database`); a second plane on the
    same root is a restart, or another process."""

    root: Path
    base_seed: int = 0
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.url = database_url(self.root)
        self.database = Database(self.url)
        self.base = self._base_spec()
        self.store = ArtifactStore(self.root / "artifacts")
        self.artifacts = Artifacts(self.database, self.store, self.root / "images")
        self.tenants = Tenants(self.database, self.artifacts)
        self.keys = Keys(self.database, PEPPER)
        self.releases = Releases(self.database)
        self.catalog = Catalog(self.database, self.artifacts, self.base, served_name=SERVED_NAME, max_rank=64)
        self.validation = Validation(self.database, self.artifacts, self.base)
        self.resolver = Resolver(self.database, served_name=SERVED_NAME, started_at=1, clock=self.clock)

    def key_cache(self, **options: Any) -> KeyCache:
        options = {"clock": self.clock} | options
        return KeyCache(self.database, PEPPER, ADMIN_TOKEN, **options)

    def start(self) -> None:
        """What a server does with the catalog before it serves."""
        self.artifacts.sweep()
        self.artifacts.sweep_images()
        self.catalog.reconcile()

    def close(self) -> None:
        self.database.close()

    def upload(
        self, tenant: str, name: str, seed: int = 1, *, serving: Serving = AS_THE_BASE, **options: Any
    ) -> tuple[VersionInfo, bool]:
        """One upload from staging to the end, as the HTTP layer does it. The same seed gives the same bytes."""
        with self.store.begin_staging() as staging:
            make_adapter(staging.directory, ARCH, seed=seed, **options)
            return self.catalog.admit(tenant, name, staging, serving=serving)

    def add(self, tenant: str, name: str, seed: int = 1) -> VersionInfo:
        return self.upload(tenant, name, seed)[0]

    def add_unchecked(self, tenant: str, name: str, seed: int = 1, *, release: bool = False) -> VersionInfo:
        """A version that waits for the check of its numbers."""
        with self.store.begin_staging() as staging:
            make_adapter(staging.directory, ARCH, seed=seed)
            return self.catalog.admit(tenant, name, staging, check=True, release=release)[0]

    def staged(self) -> list[str]:
        return [path.name for path in (self.root / "artifacts" / "staging").iterdir()]

    def stored(self) -> set[str]:
        return set(self.store.digests())

    def check_integrity(self) -> None:
        check_integrity(self.database, self.root / "artifacts")

    def _base_spec(self) -> BaseSpec:
        directory = self.root / f"base-{self.base_seed}"
        if not directory.exists():
            write_base(directory, ARCH, seed=self.base_seed)
        return load_base_spec(directory)


def caller(tenant: str, **changes: Any) -> Principal:
    return Principal(
        **({"tenant_id": tenant, "key_id": f"key-{tenant}", "scopes": frozenset({"inference"})} | changes)
    )


def digests(removal: Removal) -> set[str]:
    return set(removal.digests)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, all begun together."""
    together = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        together.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
