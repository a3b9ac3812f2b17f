"""The data plane over fakes: a scripted engine, a byte tokenizer, and a control plane of dictionaries.

    with running_data_plane() as plane:
        plane.engine.script(Reply(text="Hello"))
        plane.client().chat.completions.create(model="tiny", messages=[...])

Tenant `acme` (key `lpx_acme`) has the adapters `pirate` (versions 1 and 2, 2 released) and `json`; tenant `rival`
(key `lpx_rival`) has `secret`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.adapters.ref import AdapterRef
from loraplex.api.application import create_data_app
from loraplex.api.deps import ApiServices
from loraplex.api.drain import Drain
from loraplex.api.metrics import Metrics
from loraplex.control.audit.recorder import Actor
from loraplex.control.batches.batches import Batches
from loraplex.control.batches.files import Files
from loraplex.control.db.database import Database
from loraplex.control.db.tables import ApiKey, AuditHead, Base, Tenant
from loraplex.control.release_types import ReleaseInfo
from loraplex.control.types import (
    RATES,
    Admission,
    LimitWindow,
    ModelCard,
    Principal,
    Reservation,
    ResolvedModel,
    Serving,
    VersionInfo,
    Windows,
    WithoutInvocation,
)
from loraplex.control.usage.journal import JournalFull
from loraplex.control.usage.records import Accepted, Ended
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import VOCAB_SIZE, FakeEngineClient, fake_engine_info
from support.http.api_server import RunningServer, serve_app
from support.models.byte_tokenizer import write_byte_tokenizer

BASE = "org/tiny"
MAX_MODEL_LEN = 4096


class Refused(LoraplexError):
    def __init__(self, code: str, message: str = "no", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


def ref(tenant: str, name: str, version: int) -> AdapterRef:
    return AdapterRef(tenant, name, version, f"{tenant}{name}{version}".encode().hex().ljust(64, "0"), 8)


def principal(tenant: str | None, **changes: Any) -> Principal:
    return replace(Principal(tenant, f"key-{tenant}", frozenset({"inference"})), **changes)


@dataclass
class FakeAuthenticator:
    principals: dict[str, Principal] = field(
        default_factory=lambda: {
            "lpx_acme": principal("acme"),
            "lpx_rival": principal("rival", weight=3.0),
            "lpx_usage": principal("acme", scopes=frozenset({"usage:read"})),
            "lpx_json_only": principal("acme", models=frozenset({"json"})),
            "admin": principal(None, key_id=None, scopes=frozenset(), is_admin=True),
        }
    )
    broken: bool = False

    async def authenticate(self, secret: str) -> Principal:
        if self.broken:
            raise RuntimeError("the password of the database is hunter2")
        if secret not in self.principals:
            raise Refused("invalid_api_key", "This API key is not valid.")
        return self.principals[secret]


@dataclass
class FakeResolver:
    adapters: dict[tuple[str, str], dict[int, AdapterRef]] = field(
        default_factory=lambda: {
            ("acme", "pirate"): {1: ref("acme", "pirate", 1), 2: ref("acme", "pirate", 2)},
            ("acme", "json"): {1: ref("acme", "json", 1)},
            ("rival", "secret"): {1: ref("rival", "secret", 1)},
        }
    )

    users: list[str | None] = field(default_factory=list)
    formats: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)  # of adapters, by name
    alora: dict[str, WithoutInvocation] = field(default_factory=dict)  # of adapters, by name
    releases: dict[str, ReleaseInfo] = field(
        default_factory=dict
    )  # of adapters, by name; sticky by user or by none
    shadows: dict[str, AdapterRef] = field(default_factory=dict)  # of adapters with a release, by name
    heads: dict[str, Head] = field(default_factory=dict)  # of adapters, by name
    embeddings: dict[str, EmbeddingSpec] = field(default_factory=dict)  # of adapters, by name

    async def resolve(self, caller: Principal, model: str, *, user: str | None = None) -> ResolvedModel:
        self.users.append(user)
        if model == BASE:
            return ResolvedModel(None)
        name, _, version = model.removeprefix(f"{BASE}:").partition("@v")
        versions = self.adapters.get((caller.tenant_id or "", name), {})
        found = versions.get(int(version) if version.isdigit() else max(versions, default=0))
        if found is None:
            raise Refused("model_not_found", "The model does not exist or you do not have access to it.")
        if caller.models is not None and name not in caller.models:
            raise Refused("model_not_allowed", "This key may not use this model.")
        release = None if version else self.releases.get(name)
        return ResolvedModel(
            found,
            Serving(*self.formats.get(name, (None, None)), alora=self.alora.get(name)),
            release,
            None if release is None or release.sticky == "none" else user,
            None if release is None else self.shadows.get(name),
            self.heads.get(name),
            self.embeddings.get(name),
        )

    async def list_models(self, caller: Principal) -> Sequence[ModelCard]:
        own = [
            ModelCard(name, 1_700_000_000, versions[max(versions)].digest, BASE)
            for (tenant, name), versions in self.adapters.items()
            if tenant == caller.tenant_id
        ]
        return [ModelCard(BASE, 1_600_000_000, BASE, None), *own]


@dataclass
class FakeLimiter:
    """Remembers every admission (`costs`: with what it was settled), and every reservation and what it was settled
    with; a second settle is kept too. `held`: reserving waits for it. `again`: what `again_s` says."""

    refuse_admission_with: list[Exception] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    costs: list[tuple[str, int | None]] = field(default_factory=list)
    again: float = 0.0
    refuse_with: list[Exception] = field(default_factory=list)
    windows: tuple[LimitWindow | None, LimitWindow | None] = (None, None)
    max_output_tokens: int | None = None
    reserved: dict[str, dict[str, Any]] = field(default_factory=dict)
    settled: list[tuple[str, int | None]] = field(default_factory=list)
    held: asyncio.Event | None = None
    broken: bool = False
    asked: int = 0
    _names: dict[str, str] = field(default_factory=dict)

    async def admit(self, request_id: str, caller: Principal) -> Admission:
        if self.refuse_admission_with:
            raise self.refuse_admission_with.pop(0)
        self.admitted.append(request_id)
        return Admission(request_id, self._windows(1))

    async def reserve(self, admission: Admission, caller: Principal, **asked: Any) -> Reservation:
        if self.refuse_with:
            raise self.refuse_with.pop(0)
        self.asked += 1
        if self.held is not None:
            await self.held.wait()
        name = f"r{len(self.reserved)}"
        self.reserved[name] = {"tenant": caller.tenant_id, **asked}
        self._names[admission.request_id] = name
        return Reservation(self._windows(2), max_output_tokens=self.max_output_tokens)

    def _windows(self, count: int) -> Windows:
        given = zip(RATES, self.windows[:count], strict=False)
        return {what: window for what, window in given if window is not None}

    def of_batches(self) -> FakeLimiter:
        return self

    def again_s(self, admission: Admission) -> float:
        return self.again

    async def settle(self, admission: Admission, *, used_tokens: int | None) -> None:
        self.costs.append((admission.request_id, used_tokens))
        if admission.request_id in self._names:
            self.settled.append((self._names[admission.request_id], used_tokens))
        if self.broken:
            raise RuntimeError("the limiter is broken")

    def check(self) -> None:
        """Every request that was admitted, and every reservation, was settled exactly once."""
        assert sorted(name for name, _ in self.settled) == sorted(self.reserved)
        assert sorted(name for name, _ in self.costs) == sorted(self.admitted)


@dataclass
class FakeGrammars:
    """Takes every grammar but those that it is told to refuse. `checked`: tenants and grammars."""

    refuse_with: list[Exception] = field(default_factory=list)
    checked: list[tuple[str, str]] = field(default_factory=list)

    async def check(self, tenant: str, text: str) -> None:
        self.checked.append((tenant, text))
        if self.refuse_with:
            raise self.refuse_with.pop(0)

    async def lark_of_gbnf(self, tenant: str, text: str) -> str:
        await self.check(tenant, text)
        return f"lark of {text}"


@dataclass
class FakeLedger:
    """Remembers what was accepted and every row. `held`: a row is not safe before."""

    accepted: list[Accepted] = field(default_factory=list)
    rows: list[Ended] = field(default_factory=list)
    full: bool = False
    held: asyncio.Event | None = None

    def accept(self, record: Accepted) -> None:
        if self.full:
            raise JournalFull
        self.accepted.append(record)

    async def end(self, record: Ended) -> None:
        self.rows.append(record)
        if self.held is not None:
            await self.held.wait()

    def check(self) -> None:
        """Every request that was accepted has exactly one row."""
        assert sorted(row.id for row in self.rows) == sorted(record.id for record in self.accepted)


@dataclass
class FakeAdapters:
    """Remembers what was loaded and unloaded."""

    loaded: list[tuple[str, str]] = field(default_factory=list)

    async def load(self, by: Actor, name: str, path: str) -> VersionInfo:
        self.loaded.append((name, path))
        return VersionInfo(
            by.tenant_id or "", name, 1, "0" * 64, "ready", 8, (), 1, {}, "", False, datetime.now(UTC)
        )

    async def unload(self, by: Actor, name: str) -> None:
        self.loaded = [one for one in self.loaded if one[0] != name]


@dataclass
class DataPlane:
    engine: FakeEngineClient
    authenticator: FakeAuthenticator
    grammars: FakeGrammars
    resolver: FakeResolver
    limiter: FakeLimiter
    ledger: FakeLedger
    metrics: Metrics
    drain: Drain
    services: ApiServices
    server: RunningServer
    http: httpx.Client

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, key: str = "lpx_acme", max_retries: int = 0) -> openai.OpenAI:
        """Clients share `http`: to make one takes longer than most tests."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=max_retries, http_client=self.http
        )

    def async_client(self, key: str = "lpx_acme", **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 60, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def on_loop(self, function: Any) -> Any:
        """Runs a plain function on the server's event loop, which owns the engine's state."""

        async def run() -> Any:
            return function()

        return self.server.call(run)

    def be_patient(self, stall_s: float) -> None:
        """For so long the requests from now on wait for a client that sends or reads nothing."""
        object.__setattr__(self.services, "stall_timeout", stall_s)

    def reset(self) -> None:
        """As if the server had just started, except its metrics."""

        async def anew() -> None:
            self.engine.__init__()  # type: ignore[misc]
            await self.engine.start()

        for fake in (self.authenticator, self.grammars, self.resolver, self.limiter, self.ledger):
            fake.__init__()  # type: ignore[misc]
        self.server.call(anew)

    def settle_all(self, timeout: float = 60.0) -> None:
        """Returns when nothing is being answered, and checks the books."""

        async def settle() -> None:
            """The books are looked at in the same turn of the loop: the next request may be there already."""
            while self.drain.in_flight:
                assert await self.drain.wait_idle(timeout), "a request is still being answered"
            self.limiter.check()
            self.ledger.check()
            assert self.engine.live == []

        self.server.call(settle)


def file_database(directory: Path) -> Database:
    """An empty database with the tables, and the tenants `acme` and `rival`."""
    directory.mkdir(parents=True, exist_ok=True)
    database = Database(f"sqlite:///{directory / 'plane.db'}")
    with database.write() as session:
        Base.metadata.create_all(session.connection())
        session.add(AuditHead(id=1, seq=0, hash="0" * 64))
        for name in ("acme", "rival"):
            session.add(Tenant(id=name, weight=1.0, limits={}, created_at=datetime.now(UTC)))
            session.flush()
            session.add(
                ApiKey(
                    id=f"key-{name}",
                    tenant_id=name,
                    secret_hash="",
                    scopes=["inference"],
                    limits={},
                    created_at=datetime.now(UTC),
                )
            )
    return database


@contextmanager
def running_data_plane(
    directory: Path, *, extra_routes: Any = (), loop_factory: Any = None, **changes: Any
) -> Iterator[DataPlane]:
    """`directory` takes the tokenizer's files; `changes` are fields of ApiServices."""
    text = changes.pop("text", None)
    text = text or TextProcessor(write_byte_tokenizer(directory), max_model_len=MAX_MODEL_LEN)
    # A model has rows for all tokens of its tokenizer.
    engine = FakeEngineClient(fake_engine_info(vocab_size=max(VOCAB_SIZE, text.vocab_size)))
    metrics = Metrics(BASE)
    drain = changes.pop("drain", None) or Drain()
    database = changes.pop("database", None) or file_database(
        directory / f"database-{len([*directory.glob('database-*')])}"
    )
    services = ApiServices(
        **{
            "engine": engine,
            "text": text,
            "grammars": FakeGrammars(),
            "authenticator": FakeAuthenticator(),
            "resolver": FakeResolver(),
            "limiter": FakeLimiter(),
            "ledger": FakeLedger(),
            "adapters": FakeAdapters(),
            "database": database,
            "files": Files(database),
            "batches": Batches(database),
            "metrics": metrics,
            "drain": drain,
            "served_model_name": BASE,
            "max_model_len": MAX_MODEL_LEN,
            **changes,
        }
    )
    with (
        httpx.Client(timeout=60) as http,
        serve_app(create_data_app(services, extra_routes=extra_routes), loop_factory=loop_factory) as server,
    ):
        server.call(engine.start)
        yield DataPlane(
            engine,
            services.authenticator,
            services.grammars,
            services.resolver,
            services.limiter,
            services.ledger,
            metrics,
            drain,
            services,
            server,
            http,
        )
