"""Series: names whose versions a training pushes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from loraplex.admin.schemas.adapters import Version
from loraplex.admin.schemas.fields import RequestBody, ResponseBody, Timestamp
from loraplex.control.catalog.series import MAX_CHECK_EVERY, MAX_CONFIG_FIELDS, MAX_KEPT, MAX_QUOTA


class SeriesChange(RequestBody):
    """`keep_last`: newest versions that are kept. `check_every`: versions from one whose numbers are checked to the
    next. `latest`: each version takes all the traffic of the name once it is ready. `quota`: pushes in a minute.
    `config`: the adapter_config.json of pushes that are tensors alone."""

    keep_last: Annotated[int, Field(ge=1, le=MAX_KEPT)] = 8
    check_every: Annotated[int, Field(ge=1, le=MAX_CHECK_EVERY)] = 10
    latest: bool = True
    quota: Annotated[int, Field(ge=1, le=MAX_QUOTA)] | None = None
    config: Annotated[dict[str, Any], Field(max_length=MAX_CONFIG_FIELDS)] | None = None


class Series(ResponseBody):
    """A series, with a null where it has no quota of its own, or no config."""

    name: str
    keep_last: int
    check_every: int
    latest: bool
    quota: int | None
    config: dict[str, Any] | None
    created_at: Timestamp


class PushedVersion(Version):
    """`durable`: its bytes are on the disk, and outlive the server."""

    durable: bool
