"""Requests that measure an adapter's sites, and their answers."""

from __future__ import annotations

import uuid

from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import EngineError, ErrorCode, MeasureRequest
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineDraining, EngineLost, EngineOverloaded, ServingError

MEASURE_DEADLINE_S = 60.0
_ERRORS: dict[ErrorCode, type[ServingError]] = {
    "engine_restarting": EngineLost,
    "draining": EngineDraining,
    "server_overloaded": EngineOverloaded,
}


class MeasureFailed(ServingError):
    """The engine did not measure the sites of an adapter. `code` is its own code of the error."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.code = error.code
        self.retry_after_s = error.retry_after_s


def measure_request(ref: AdapterRef) -> MeasureRequest:
    """A request for the sites of `ref`, with an id of its own."""
    return MeasureRequest(f"measure-{uuid.uuid4().hex}", ref, MEASURE_DEADLINE_S)


async def read_outputs(stream: RequestStream, dtype: str) -> SiteOutputs:
    """Wait for the outputs of a model that is served in `dtype`. Raises ServingError. Aborts the request where it is
    cancelled."""
    async with stream:
        async for event in stream:
            if event.error is not None and event.error.code == "adapter_unavailable":
                return SiteOutputs(dtype, (), b"", b"", event.error.message)
            if event.error is not None:
                found = _ERRORS.get(event.error.code)
                raise MeasureFailed(event.error) if found is None else found(event.error.message)
            if event.measured is not None:
                return event.measured
    raise ServingError("the engine ended the measurement without a result")
