"""Kept texts of a release's shadow version."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from loraplex.admin.schemas.fields import QueryParameters, ResponseBody, Timestamp
from loraplex.control.catalog.shadow_store import MOST_TEXTS


class ShadowQuery(QueryParameters):
    limit: Annotated[int, Field(ge=1, le=MOST_TEXTS)] = 20


class ShadowSample(ResponseBody):
    """A sampled request: its prompt, the answer that the caller got, and that of the shadow `version`."""

    id: str
    version: str
    at: Timestamp
    prompt: str
    answer: str
    shadow_answer: str


class ShadowSamples(ResponseBody):
    """The newest first."""

    data: list[ShadowSample]
