"""The caller: what a secret is, and the base model that its adapters must fit."""

from __future__ import annotations

from typing import Literal

from loraplex.admin.schemas.fields import ResponseBody
from loraplex.admin.schemas.keys import Key


class BaseModelShape(ResponseBody):
    """The served base model. `hidden_size` is null where it has no output head that an adapter can change; `vocab_size`
    are the rows of its embedding, or of that head, null where it has neither; an adapter's rank is at most
    `max_adapter_rank`."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int | None
    vocab_size: int | None
    fingerprint: str
    max_adapter_rank: int


class Caller(ResponseBody):
    """`kind` is `admin` for the admin token, whose `tenant` and `key` are null. `max_upload_bytes`: of the files of
    one adapter. `data_url`: where browsers reach the data plane; null if the operator did not say."""

    kind: Literal["admin", "key"]
    tenant: str | None
    key: Key | None
    base: BaseModelShape
    max_upload_bytes: int
    data_url: str | None
