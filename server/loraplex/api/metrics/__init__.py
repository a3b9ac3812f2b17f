"""Prometheus metrics of a server.

- `Metrics`: the instruments, in `api_metrics`. `Scraper`: the text of one scrape.
- `count_request`: what an ended request adds. `arm_metrics`: arms of watched releases.
- `engine_metrics`: figures that the engine reports, as an `EngineSnapshot`. `part_meters`: what other parts tell.
  `collectors`: what is read at a scrape.
- `label_sets`: how many tenants and adapters have labels of their own.
"""

from loraplex.api.metrics.api_metrics import LimitsOutcome, Metrics, adapter_label
from loraplex.api.metrics.engine_metrics import EngineSnapshot
from loraplex.api.metrics.request_counts import count_request
from loraplex.api.metrics.scraper import Scraper

__all__ = ["EngineSnapshot", "LimitsOutcome", "Metrics", "Scraper", "adapter_label", "count_request"]
