"""The admin plane over the real control services, a tiny base and a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.fault_points import Fault, no_fault
from loraplex.admin.app import create_admin_app, create_tenant_app
from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.admin.services import AdminServices, ExamineChat, UploadGate
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.log import AuditLog
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.releases import Releases
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.series import AllSeries
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.flushes import Flushes
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import Principal, VersionInfo
from loraplex.control.usage.overview import Overviews
from loraplex.lifecycle.agreement_checks import AgreementChecks, Score
from loraplex.lifecycle.base_errors import BaseErrors, ServedBase
from loraplex.lifecycle.durability import Durability
from loraplex.lifecycle.eviction import SurplusRemoval
from loraplex.lifecycle.version_checks import VersionChecks
from loraplex.migrations.run import upgrade
from support.adapters.drafts import TinyBase, make_adapter, write_base
from support.control.integrity import check_integrity
from support.engine.fake_base_measure import FakeBaseMeasure, MeasureBase
from support.engine.fake_engine import FakeEngineClient
from support.engine.fake_measure import FakeMeasure

ADMIN_TOKEN = "lpx-admin-for-tests"
PEPPER = b"p" * 32
ARCH = TinyBase()
SERVED_NAME = "tiny"


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """An empty database with this version's schema and the tiny base, made once; gone with the interpreter."""
    made = tempfile.TemporaryDirectory(prefix="loraplex-tests-")
    upgrade(f"sqlite:///{made.name}/control.db")
    write_base(Path(made.name) / "base", ARCH)
    return made


async def fake_score(
    principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Log probabilities in place of the engine's: -1 of each token."""
    return [[-1.0] * (len(prompt) - 1) for prompt in prompts]


@functools.cache
def _base_spec() -> BaseSpec:
    return load_base_spec(Path(_template().name) / "base")


def warm_up() -> None:
    """Make what all planes of a process share, before it forks."""
    _base_spec()


class FakeDurabilityWatch:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.waits: list[float] = []
        self.num_failures = 0

    def durable(self, seconds: float) -> None:
        self.waits.append(seconds)

    def flush_failed(self) -> None:
        self.num_failures += 1


class FakeAgreementWatch:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.outcomes: list[str] = []

    def compared(self, mean: float) -> None:
        self.means.append(mean)

    def judged(self, outcome: str) -> None:
        self.outcomes.append(outcome)


@dataclass
class AdminPlane:
    """`services` as a factory would build them in `root`; `app` is the operators' port, `tenant_app` what the data
    plane mounts at /admin/v1."""

    root: Path
    max_upload_bytes: int = 8 << 20
    gate: UploadGate = field(default_factory=UploadGate)
    change_limit: ChangeRateLimit = field(default_factory=ChangeRateLimit)
    fault: Fault = no_fault
    wait_s: float = 30.0
    surplus_pause_s: float = 0.0
    examine_chat: ExamineChat | None = None
    score: Score = fake_score
    measure_base: MeasureBase | None = None
    """In place of `base_measure`, a fake."""
    warn_above: float = 0.1

    def __post_init__(self) -> None:
        template = Path(_template().name)
        if not (self.root / "control.db").exists():
            shutil.copyfile(template / "control.db", self.root / "control.db")
        chosen = self.root / "database-url"  # of support.control.plane.use_database
        url = chosen.read_text() if chosen.exists() else f"sqlite:///{self.root / 'control.db'}"
        self.engine = FakeEngineClient()
        asyncio.run(self.engine.start())
        self.database = Database(url)
        self.store = store = ArtifactStore(self.root / "artifacts", self.fault)
        artifacts = Artifacts(self.database, store)
        base = _base_spec()
        catalog = Catalog(self.database, artifacts, base, served_name=SERVED_NAME, max_rank=64)
        self.validation = Validation(self.database, artifacts, base)
        self.engine.measure = self.measure = FakeMeasure(store.path, base)
        self.outcomes: list[str] = []
        self.base_measure = FakeBaseMeasure()
        self.base_errors = BaseErrors(
            database=self.database,
            validation=self.validation,
            store=store,
            served=ServedBase(lambda text: [byte % ARCH.vocab for byte in text.encode()]),
            warn_above=self.warn_above,
            measure=self.measure_base or self.base_measure,
        )
        self.surplus = SurplusRemoval(
            database=self.database,
            catalog=catalog,
            engine=self.engine,
            retention=Retention(self.database, artifacts, 0),
            again_s=0.01,
            pause_s=self.surplus_pause_s,
        )
        self.agreement_watch = FakeAgreementWatch()
        self.checks = VersionChecks(
            database=self.database,
            catalog=catalog,
            validation=self.validation,
            tenants=Tenants(self.database, artifacts),
            store=store,
            engine=self.engine,
            agreements=AgreementChecks(self.database, self.engine, self._score, self.agreement_watch),
            surplus=self.surplus,
            base_errors=self.base_errors,
            on_outcome=self.outcomes.append,
            wait_s=self.wait_s,
            scan_s=0.01,
        )
        self.flushes = Flushes(self.database, store)
        self.watch = FakeDurabilityWatch()
        self.durability = Durability(self.database, self.flushes, self.watch, first_pause_s=0.01)
        self.services = AdminServices(
            database=self.database,
            tenants=Tenants(self.database, artifacts),
            keys=Keys(self.database, PEPPER),
            key_cache=KeyCache(self.database, PEPPER, ADMIN_TOKEN),
            catalog=catalog,
            releases=Releases(self.database),
            series=AllSeries(self.database, catalog.check_name),
            surplus=self.surplus,
            durability=self.durability,
            on_push=self.watch.pushed.append,
            artifacts=artifacts,
            audit=AuditLog(self.database),
            overviews=Overviews(self.database, catalog.base.fingerprint),
            engine=self.engine,
            sources=AllowedSources([f"file://{self.root.resolve()}"]),
            max_upload_bytes=self.max_upload_bytes,
            upload_gate=self.gate,
            change_limit=self.change_limit,
            checks=self.checks,
            score=self._score,
            **({} if self.examine_chat is None else {"examine_chat": self.examine_chat}),
        )
        self.app = create_admin_app(self.services)
        self.tenant_app = create_tenant_app(self.services)

    async def _score(
        self, principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        return await self.score(principal, info, prompts)

    def start(self) -> None:
        """What a server does with the catalog before it serves."""
        self.services.artifacts.sweep()
        self.services.catalog.reconcile()

    def close(self) -> None:
        self.database.close()

    def check_integrity(self) -> None:
        check_integrity(self.database, self.root / "artifacts")

    def leftovers(self) -> list[str]:
        return [path.name for path in (self.root / "artifacts" / "staging").iterdir()]

    def make_tenant(self, tenant: str = "acme", **options: Any) -> str:
        self.services.tenants.create(tenant, **options)
        return tenant

    def make_key(self, tenant: str = "acme", *scopes: str) -> str:
        """A key's secret."""
        return self.services.keys.create(tenant, scopes=scopes or ("adapters:read", "adapters:write"))[1]

    def make_adapter(
        self, name: str = "support", tenant: str = "acme", seed: int = 1, *, check: bool = False
    ) -> str:
        """Admitted without HTTP; the version's name. With `check` it is left validating."""
        with self.services.artifacts.store.begin_staging() as staging:
            make_adapter(staging.directory, ARCH, seed=seed)
            return self.services.catalog.admit(tenant, name, staging, check=check)[0].version


def admin_client(app: Any, secret: str | None = ADMIN_TOKEN) -> httpx.AsyncClient:
    """A client of `app` in memory: for plain requests and answers."""
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers)


def adapter_files(directory: Path, **options: Any) -> dict[str, tuple[str, bytes]]:
    """A small adapter as httpx's `files`."""
    made = make_adapter(directory, ARCH, **options)
    return {path.name: (path.name, path.read_bytes()) for path in (made.config, made.tensors)}


def assert_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """That it is this problem document, with all its parts; returns it."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), (
        answer.text
    )
    body: dict[str, Any] = answer.json()
    assert (body["status"], body["code"]) == (status, code), body
    assert all(isinstance(body[key], str) and body[key] for key in ("type", "title", "detail"))
    return body
