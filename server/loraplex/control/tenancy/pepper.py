"""The database knows under which pepper its keys were hashed, so that a server with another one does not start."""

from __future__ import annotations

from sqlalchemy import func, select

from loraplex.control.audit.recorder import LOCAL, record
from loraplex.control.db.database import Database
from loraplex.control.db.tables import ApiKey, Installation
from loraplex.control.errors import PepperChanged
from loraplex.control.tenancy.secrets import hash_secret

PEPPER_NAME = "key-pepper"
"""Name of the row of `installation` that holds the pepper's mark."""


def pepper_mark(pepper: bytes) -> str:
    """A hash that reveals nothing about the pepper."""
    return hash_secret(pepper, "the mark of this pepper")


def check_pepper(database: Database, pepper: bytes, *, accept: bool = False) -> None:
    """Check the pepper at the start. The first server leaves its mark. Another pepper is taken where there is no living
    key that it would make useless, or with `accept`. Raises PepperChanged."""
    mark = pepper_mark(pepper)
    with database.write(ages_caches=False) as session:
        row = session.get(Installation, PEPPER_NAME)
        if row is None:
            session.add(Installation(name=PEPPER_NAME, value=mark))
        elif row.value != mark:
            living = session.scalar(select(func.count()).where(ApiKey.revoked_at.is_(None))) or 0
            if living and not accept:
                raise PepperChanged(
                    f"the key pepper is not the one under which the {living} keys in the database were hashed: none of "
                    "them would work. Put the file key-pepper back into the data directory, or give --key-pepper the "
                    "one that the other servers have. If it is lost: 'loraplex migrate --accept-new-pepper', and "
                    "rotate every key."
                )
            row.value = mark
            record(session, LOCAL, "pepper.accept", "installation/key-pepper", tenant_id=None)
