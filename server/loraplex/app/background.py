"""Everything that a server does beside its requests."""

from __future__ import annotations

from functools import partial

from loraplex.app.damage import DamageReports
from loraplex.app.factory import Installation
from loraplex.app.weights import WeightWatch
from loraplex.control.usage.roll_up import UsageRollUp
from loraplex.serving.client import EngineClient


def start_background(installation: Installation, engine: EngineClient, damage: DamageReports) -> None:
    """Call on the event loop. It ends with `installation.background`; what limits need starts with them."""
    database, tasks = installation.database, installation.background
    tasks.watch(installation.usage_journal.state)
    tasks.start("key-use", installation.key_use.run)
    tasks.start("usage-writer", installation.usage_writer.run)
    tasks.start("usage-roll-up", UsageRollUp(database, installation.settings.usage_keep_days).run)
    tasks.start("database-watch", database.watch)
    tasks.start("damage-reports", partial(damage.run, engine))
    tasks.start("weight-watch", partial(WeightWatch(database, installation.tenants).run, engine))
