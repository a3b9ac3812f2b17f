"""Resolves a request's `model`: the base, or one version of one of the caller's adapters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.adapters.ref import AdapterRef
from loraplex.control.catalog.release_reading import current_release, current_releases
from loraplex.control.catalog.sticky import sticky_version
from loraplex.control.catalog.versions import lost, retired, version_number
from loraplex.control.db.database import Database
from loraplex.control.db.read_through import DEFAULT_STALENESS_S, ReadThrough
from loraplex.control.db.tables import LIVING, AdapterVersion, adapter_subject, catalog_subject
from loraplex.control.errors import AdapterUnavailable, ModelNotAllowed, ModelNotFound
from loraplex.control.release_types import ReleaseInfo
from loraplex.control.rules import is_adapter_name
from loraplex.control.tenancy.tenants import tenant_subject
from loraplex.control.types import ModelCard, Principal, ResolvedModel, Serving

MIN_DIGEST_CHARS = 12
_HEX = frozenset("0123456789abcdef")
_CHECK_RETRY_S = 5.0
_OTHER_RETRY_S = 60.0
_REMEDY = {
    "validating": "its numbers are being checked; try again in a few seconds",
    "corrupt": "its stored bytes are damaged or lost; upload the same files again",
    "incompatible": "it was made for another base model; upload one made for this one, and release it",
}


@dataclass(frozen=True, slots=True)
class _Version:
    """The part of a version that a request needs; its report stays in the database."""

    ref: AdapterRef
    state: str
    created_at: datetime
    serving: Serving
    head: Head | None
    embedding: EmbeddingSpec | None


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A name as the database had it: its living versions by number, and its release."""

    versions: Mapping[int, _Version]
    release: ReleaseInfo | None


class Resolver:
    """Answers from memory: at most `ttl_s` behind the database, not at all behind changes of this process, and
    `staleness_s` more while the database cannot be reached. At most `capacity` names are remembered, and the lists of
    `list_capacity` tenants. A request reads the name that it asks for and no other: what it costs does not depend on
    how many adapters there are, or on what else is changed."""

    def __init__(
        self,
        database: Database,
        *,
        served_name: str,
        started_at: int,
        ttl_s: float = 2.0,
        capacity: int = 20_000,
        list_capacity: int = 200,
        staleness_s: float = DEFAULT_STALENESS_S,
        clock: Callable[[], float] = time.monotonic,
        random_source: random.Random | None = None,
    ) -> None:
        self._database = database
        self._served_name = served_name
        self._started_at = started_at
        self._random = random_source or random.Random()  # noqa: S311 - spreads traffic, keeps no secret
        self._adapters: ReadThrough[tuple[str, str], _Adapter] = ReadThrough(
            database,
            ttl_s=ttl_s,
            capacity=capacity,
            staleness_s=staleness_s,
            aged_by=lambda key: (adapter_subject(*key), tenant_subject(key[0])),
            clock=clock,
        )
        self._states: ReadThrough[tuple[str, str, int], str] = ReadThrough(
            database,
            ttl_s=ttl_s,
            capacity=capacity,
            staleness_s=staleness_s,
            aged_by=lambda key: (adapter_subject(*key[:2]), tenant_subject(key[0])),
            clock=clock,
        )
        self._lists: ReadThrough[str, Mapping[str, _Adapter]] = ReadThrough(
            database,
            ttl_s=ttl_s,
            capacity=list_capacity,
            staleness_s=staleness_s,
            aged_by=lambda tenant_id: (catalog_subject(tenant_id), tenant_subject(tenant_id)),
            clock=clock,
        )

    async def resolve(self, principal: Principal, model: str, *, user: str | None = None) -> ResolvedModel:
        """`user` is the request's own label of its end user, for releases that are sticky by it.

        Raises ModelNotFound, ModelNotAllowed, AdapterUnavailable, DatabaseUnavailable.
        """
        if model == self._served_name:
            self._check_allowed(principal, model, model)
            return ResolvedModel(None)
        spelled = model.removeprefix(self._served_name + ":")
        name, _, selector = spelled.partition("@")
        adapter = await self._adapter(principal.tenant_id, name)
        if model.endswith("@"):
            raise _not_found(model)
        if adapter is None:
            raise await self._no_version(principal, model, name, selector)
        release = None if selector else adapter.release
        caller = None if release is None else _caller(principal, release, user)
        version = _select(adapter, selector) if selector else self._released(principal, name, adapter, caller)
        if version is None:
            raise await self._no_version(principal, model, name, selector or _heaviest(adapter))
        self._check_allowed(principal, model, name, spelled)
        if version.state != "ready":
            raise AdapterUnavailable(
                f"{name}@v{version.ref.version} is {version.state} and cannot be served: {_REMEDY[version.state]}.",
                param="model",
                retry_after_s=_CHECK_RETRY_S if version.state == "validating" else _OTHER_RETRY_S,
            )
        shadow = None if release is None else _shadow(adapter, release, version)
        return ResolvedModel(
            version.ref, version.serving, release, caller, shadow, version.head, version.embedding
        )

    async def list_models(self, principal: Principal) -> list[ModelCard]:
        """The models of this key: the base, then the released adapters by name."""
        cards = [ModelCard(self._served_name, self._started_at, self._served_name, None)]
        for name, adapter in sorted((await self._all_adapters(principal.tenant_id)).items()):
            release = adapter.release
            weights = (
                {} if release is None else {int(t.version[1:]): t.weight for t in release.targets if t.weight}
            )
            served = [adapter.versions[number] for number in weights if number in adapter.versions]
            served = [version for version in served if version.state == "ready"]
            if served:
                best = max(served, key=lambda version: weights[version.ref.version])
                created = int(best.created_at.timestamp())
                cards.append(ModelCard(name, created, best.ref.digest, self._served_name, best.serving))
        return [card for card in cards if self._is_allowed(principal, card.id)]

    def _is_allowed(self, principal: Principal, *names: str) -> bool:
        """A key's `models` may spell an adapter with the base's name before it or without, as requests may."""
        models = principal.models
        if models is None:
            return True
        return any(name in models or f"{self._served_name}:{name}" in models for name in names)

    def _check_allowed(self, principal: Principal, model: str, *names: str) -> None:
        if not self._is_allowed(principal, *names):
            raise ModelNotAllowed(f"This API key may not use the model '{model[:200]}'.", param="model")

    def _released(
        self, principal: Principal, name: str, adapter: _Adapter, caller: str | None
    ) -> _Version | None:
        release = adapter.release
        if release is None or not release.targets:
            # A name whose first version is being checked.
            waiting = [version for version in adapter.versions.values() if version.state != "ready"]
            return max(waiting, key=lambda version: version.ref.version, default=None)
        found = [(adapter.versions.get(int(t.version[1:])), t.weight) for t in release.targets]
        targets = [(version, weight) for version, weight in found if version is not None and weight > 0]
        # What is damaged keeps its share, and answers that it is: traffic must not move to another version unseen.
        ready = [pair for pair in targets if pair[0].state != "incompatible"] or targets
        if not ready:
            return None
        weights = {version.ref.version: weight for version, weight in ready}
        if caller is None:
            number = self._random.choices(list(weights), list(weights.values()))[0]
        else:
            number = sticky_version(f"{principal.tenant_id}/{name}", caller, weights)
        return adapter.versions[number]

    async def _no_version(self, principal: Principal, model: str, name: str, selector: str) -> ModelNotFound:
        """The refusal of a name that has no such version. It tells a key that may use the name of a version that the
        name had: that its series does not keep it, or that its bytes are lost."""
        number, tenant_id = version_number(selector), principal.tenant_id
        if not is_adapter_name(name):
            return _not_found(model)
        if number > 0 and tenant_id is not None and self._is_allowed(principal, name, f"{name}@{selector}"):
            state = await self._states.get(
                (tenant_id, name, number), self._read_state, tenant_id, name, number
            )
            if state in ("retired", "lost"):
                told = retired(name, selector) if state == "retired" else lost(name, selector)
                return ModelNotFound(told, param="model")
        return _not_found(model)

    async def _adapter(self, tenant_id: str | None, name: str) -> _Adapter | None:
        if tenant_id is None or not is_adapter_name(name):
            return None
        return await self._adapters.get((tenant_id, name), self._read_one, tenant_id, name)

    async def _all_adapters(self, tenant_id: str | None) -> Mapping[str, _Adapter]:
        if tenant_id is None:
            return {}
        return await self._lists.get(tenant_id, self._read_all, tenant_id) or {}

    def _read_one(self, tenant_id: str, name: str) -> _Adapter | None:
        with self._database.read() as session:
            versions = _read_versions(session, tenant_id, AdapterVersion.name == name).get(name)
            return None if versions is None else _Adapter(versions, current_release(session, tenant_id, name))

    def _read_state(self, tenant_id: str, name: str, number: int) -> str | None:
        of = AdapterVersion
        query = select(of.state).where(of.tenant_id == tenant_id, of.name == name, of.number == number)
        with self._database.read() as session:
            return session.scalar(query)

    def _read_all(self, tenant_id: str) -> Mapping[str, _Adapter]:
        with self._database.read() as session:
            found = _read_versions(session, tenant_id)
            releases = current_releases(session, tenant_id)
        return {name: _Adapter(versions, releases.get(name)) for name, versions in found.items()}


def _read_versions(
    session: Session, tenant_id: str, *conditions: ColumnElement[bool]
) -> dict[str, dict[int, _Version]]:
    """The living versions by name and number."""
    of = AdapterVersion
    columns = (
        of.name,
        of.number,
        of.digest,
        of.rank,
        of.state,
        of.created_at,
        of.invocation,
        of.head,
        of.embedding,
        of.tool_format,
        of.reasoning_format,
        of.chat_digest,
        of.alora,
    )
    query = (
        select(*columns).where(of.tenant_id == tenant_id, LIVING, *conditions).order_by(of.name, of.number)
    )
    found: dict[str, dict[int, _Version]] = {}
    for name, number, digest, rank, state, created_at, *more in session.execute(query):
        invocation, head, embedding, *serving = more
        ref = AdapterRef(tenant_id, name, number, digest, rank, tuple(invocation or ()))
        found.setdefault(name, {})[number] = _Version(
            ref,
            state,
            created_at,
            Serving(*serving),
            Head.of_json(head),
            EmbeddingSpec.of_json(embedding),
        )
    return found


def _select(adapter: _Adapter, selector: str) -> _Version | None:
    """A version by `vN` or by at least 12 characters of its digest, `sha256:…`."""
    if selector.startswith("v"):
        return adapter.versions.get(version_number(selector))
    prefix = selector.removeprefix("sha256:")
    if prefix == selector or not MIN_DIGEST_CHARS <= len(prefix) <= 64 or not _HEX.issuperset(prefix):
        return None
    matches = [version for version in adapter.versions.values() if version.ref.digest.startswith(prefix)]
    ready = [version for version in matches if version.state == "ready"]
    chosen = ready or matches
    return chosen[-1] if len({version.ref.digest for version in chosen}) == 1 else None


def _heaviest(adapter: _Adapter) -> str:
    """The version that the release gives most traffic. Empty where it names none."""
    targets = () if adapter.release is None else adapter.release.targets
    return max(targets, key=lambda target: target.weight).version if targets else ""


def _caller(principal: Principal, release: ReleaseInfo, user: str | None) -> str | None:
    """The label that the release is sticky by."""
    return {"user": user or principal.key_id, "key": principal.key_id, "none": None}[release.sticky]


def _shadow(adapter: _Adapter, release: ReleaseInfo, serving: _Version) -> AdapterRef | None:
    """The release's shadow version, where it can answer as the one that serves does."""
    plan = release.plan.shadow
    shadow = None if plan is None else adapter.versions.get(version_number(plan.version))
    if shadow is None or shadow.state != "ready" or shadow.serving != serving.serving:
        return None
    return shadow.ref


def _not_found(model: str) -> ModelNotFound:
    return ModelNotFound(
        f"The model '{model[:200]}' does not exist or you do not have access to it.", param="model"
    )
