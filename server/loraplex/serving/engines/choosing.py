"""Which engine a prompt goes to, by its first KV block."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.serving.engines.replica import Replica, in_order
from loraplex.serving.placement.choice import choose
from loraplex.serving.placement.homes import Homes


def choose_replica(
    ready: Sequence[Replica], homes: Homes, digest: str | None, link: bytes, *, counts_load: bool = True
) -> Replica:
    """One of these replicas, which take requests, of at least one. `digest`: of the version that must be there, `link`:
    the name of the prompt's first KV block. Without `counts_load`, as if none had any."""
    by_name = {replica.id: replica for replica in ready}
    places: list[str] = []
    resident: list[str] = list(by_name)
    if digest:
        places = [each.member for each in homes.of(digest)]
        if not any(name in by_name for name in places):
            places = [in_order(digest, ready)[0].id]
        resident = [each.id for each in ready if each.session.adapter_state(digest) == "hot"]
    loads = {replica.id: replica.load() for replica in ready}
    name = choose(
        loads if counts_load else {name: load._replace(load=0) for name, load in loads.items()},
        places=places,
        resident=resident,
        load_s=homes.load_s if digest else 0.0,
        prefix=link,
    )
    assert name is not None, "there is a replica"
    return by_name[name]
