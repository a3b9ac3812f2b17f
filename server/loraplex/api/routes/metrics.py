"""`/metrics`, for both ports."""

from __future__ import annotations

from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from loraplex.api.metrics import Scraper
from loraplex.api.route import DataRoute


def metrics_route(scraper: Scraper, *, in_document: bool = True) -> DataRoute:
    """No token is needed."""

    async def scrape() -> PlainTextResponse:
        """The vllm:* metrics."""
        return PlainTextResponse(await scraper.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return DataRoute(
        "/metrics",
        scrape,
        methods=["GET"],
        operation_id="scrape",
        response_class=PlainTextResponse,
        include_in_schema=in_document,
    )
