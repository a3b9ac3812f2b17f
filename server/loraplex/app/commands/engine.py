"""`loraplex engine`: one engine that dials a server."""

from __future__ import annotations

from typing import Any

import typer

from loraplex.app.commands.server import with_settings
from loraplex.app.settings import Settings
from loraplex.app.supported_platform import require_supported_platform

SETTINGS = (
    "model", "served_model_name", "device", "dtype", "quantise", "max_model_len", "kernels", "attention",
    "batch_invariant", "recorded_prompt_rows", "lookahead", "threads", "engine_spare", "kv_cache_memory",
    "adapter_memory", "adapter_cpu_memory", "adapter_image_cache", "max_num_seqs", "max_num_batched_tokens",
    "max_waiting", "max_adapter_rank", "adapter_load_timeout", "data_dir", "artifact_url", "artifact_cache_size",
    "engine_token_file", "drain_timeout", "log_level",
)  # fmt: skip
"""The settings of an engine, as `loraplex serve` has them."""


def create_engine_command() -> Any:
    return with_settings(
        _engine,
        only=SETTINGS,
        join=typer.Option(
            ..., "--join", metavar="<host:port>", help="The server's --engine-host and --engine-port"
        ),
        replica=typer.Option(
            None, "--replica", metavar="<name>", help="Its name at the server (default: this machine's)"
        ),
    )


def _engine(settings: Settings, *, join: str, replica: str | None) -> None:
    require_supported_platform()
    from loraplex.app.engines.process import run_engine

    raise typer.Exit(run_engine(settings, join, replica))
