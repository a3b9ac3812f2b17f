"""Tags of adapters: a few short words each, by which the list of all adapters is filtered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, tuple_
from sqlalchemy.orm import Session

from loraplex.control.audit.recorder import Actor, record
from loraplex.control.db.database import Database
from loraplex.control.db.tables import AdapterTag
from loraplex.control.errors import InvalidValue
from loraplex.control.tenancy.tenants import tenant_target

MAX_TAGS = 8
"""Tags of one adapter."""
MAX_TAG_CHARS = 32
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")


@dataclass(frozen=True, slots=True)
class TagEdit:
    """Tags to add and to remove, whatever others the adapter has. One that it has, or lacks, is no error."""

    add: Sequence[str] = ()
    remove: Sequence[str] = ()

    def of(self, tags: Sequence[str]) -> tuple[str, ...]:
        """The tags after the edit, in order. Raises InvalidValue."""
        add, remove = check_tags(self.add, "add"), check_tags(self.remove, "remove")
        if both := sorted(set(add).intersection(remove)):
            raise InvalidValue(f"The tag '{both[0]}' is to be added and removed.", param="remove")
        return _bounded({*tags, *add} - set(remove), "add")


Tags = Sequence[str] | TagEdit
"""Those that an adapter is to have, or an edit of those that it has."""


def replace_tags(session: Session, tenant_id: str, name: str, tags: Tags, by: Actor) -> None:
    """Give an adapter these tags in place of those that it has, or edit those, and record it. Raises InvalidValue,
    which says which tag is wrong and why."""
    before = forget_tags(session, tenant_id, name)
    after = tags.of(before.get("tags", [])) if isinstance(tags, TagEdit) else check_tags(tags)
    if after:
        of = {"tenant_id": tenant_id, "name": name}
        session.execute(insert(AdapterTag), [of | {"tag": tag} for tag in after])
    record(
        session,
        by,
        "adapter.update",
        f"{tenant_target(tenant_id)}/adapters/{name}",
        tenant_id=tenant_id,
        before={"tags": []} | before,
        after={"tags": list(after)},
    )


def check_added(database: Database, tenant_id: str, name: str, tags: Sequence[str]) -> None:
    """Refuse what `add_tags` would, before an upload is read. Raises InvalidValue."""
    with database.read() as session:
        _with_added(session, tenant_id, name, tags)


def add_tags(session: Session, tenant_id: str, name: str, tags: Sequence[str], by: Actor) -> None:
    """Add the tags of an upload to those that the adapter has, and record it where that changes them. Raises
    InvalidValue."""
    if not tags:
        return
    had, after = _with_added(session, tenant_id, name, tags)
    if after != had:
        replace_tags(session, tenant_id, name, after, by)


def _with_added(
    session: Session, tenant_id: str, name: str, tags: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tags before and after."""
    given = check_tags(tags)
    had = tags_of(session, [(tenant_id, name)]).get((tenant_id, name), ())
    return had, _bounded({*had, *given}, "tags")


def check_tags(tags: Sequence[str], param: str = "tags") -> tuple[str, ...]:
    """The tags in order. `param` is the field that has them. Raises InvalidValue."""
    if len(tags) > MAX_TAGS:
        raise InvalidValue(
            f"An adapter has at most {MAX_TAGS} tags, and {len(tags)} were given.", param=param
        )
    for place, tag in enumerate(tags):
        if (wrong := _wrong(tag)) or tag in tags[:place]:
            shown = tag[:MAX_TAG_CHARS] + ("…" if len(tag) > MAX_TAG_CHARS else "")
            raise InvalidValue(
                f"Tag {place + 1}, '{shown}', {wrong or 'is given twice'}.", param=f"{param}.{place}"
            )
    return tuple(sorted(tags))


def _bounded(tags: Collection[str], param: str) -> tuple[str, ...]:
    if len(tags) > MAX_TAGS:
        told = f"An adapter has at most {MAX_TAGS} tags, and this one would have {len(tags)}."
        raise InvalidValue(told, param=param)
    return tuple(sorted(tags))


def _wrong(tag: str) -> str | None:
    if not tag:
        return "is empty"
    if len(tag) > MAX_TAG_CHARS:
        return f"has {len(tag)} characters, and may have {MAX_TAG_CHARS}"
    if not _ALLOWED.issuperset(tag):
        return "has other characters than a-z, 0-9, '.', '_' and '-'"
    return None


def tags_of(session: Session, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The tags, in order, of those of these adapters (tenant and name) that have any."""
    if not names:
        return {}
    row = AdapterTag
    query = select(row.tenant_id, row.name, row.tag).where(tuple_(row.tenant_id, row.name).in_(sorted(names)))
    found: dict[tuple[str, str], list[str]] = {}
    for tenant_id, name, tag in session.execute(query):
        found.setdefault((tenant_id, name), []).append(tag)
    # Not by the database, whose order of '-', '.' and '_' is that of its locale.
    return {key: tuple(sorted(tags)) for key, tags in found.items()}


def forget_tags(session: Session, tenant_id: str, name: str) -> dict[str, list[str]]:
    """Delete the tags of an adapter. Returns them as the audit log shows them, which is empty where it had none."""
    had = tags_of(session, [(tenant_id, name)]).get((tenant_id, name))
    if had is None:
        return {}
    session.execute(delete(AdapterTag).where(AdapterTag.tenant_id == tenant_id, AdapterTag.name == name))
    return {"tags": list(had)}
