"""TRL's own clients for LoRA loading, as their trainers call them. Prints a JSON object of what each call returned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from trl.experimental.async_distillation.vllm_client import VLLMClient as DistillationClient
from trl.experimental.async_grpo.vllm_client import VLLMClient as GrpoClient


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or its exception in words."""
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def converse(client: Any, name: str, folders: list[str], missing: str, foreign: str) -> dict[str, Any]:
    found = {
        "ready": outcome(client.wait_for_server_ready),
        "max_model_len": outcome(client.get_max_model_len),
    }
    # A new policy gets a new name; the oldest is unloaded once two newer ones are there.
    for number, folder in enumerate(folders, 1):
        found[f"load {number}"] = outcome(client.load_lora_adapter, f"{name}-v{number}", folder)
    found["unload 1"] = outcome(client.unload_lora_adapter, f"{name}-v1")
    found["unload 1 again"] = outcome(client.unload_lora_adapter, f"{name}-v1")
    found["no folder"] = outcome(client.load_lora_adapter, f"{name}-none", missing)
    found["another tenant's"] = outcome(client.load_lora_adapter, f"{name}-stolen", foreign)
    return found


PartialState()  # as every trainer makes it; the clients' loggers need it
given = json.loads(sys.argv[1])
print(
    json.dumps(
        {
            name: converse(
                kind(given["url"], 20.0), name, given["folders"], given["missing"], given["foreign"]
            )
            for name, kind in (("grpo", GrpoClient), ("distillation", DistillationClient))
        }
    )
)
