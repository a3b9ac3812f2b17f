"""guidellm as it is shipped (`make clients`): its own command line against a running server, offline."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.clients.outside_clients import INSTALLED

NAME = "guidellm"
PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 32, 16, 4
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Benchmark:
    """What guidellm reported of one benchmark; counts of requests, and of tokens over all that succeeded."""

    successful: int
    errored: int
    incomplete: int
    prompt_tokens: int
    output_tokens: int
    errors: tuple[str, ...]
    """What it said of the requests that failed, each only once."""


def benchmark(
    url: str,
    key: str,
    model: str | None,
    tokenizer: Path,
    folder: Path,
    *,
    profile: str = "kind=synchronous",
    **backend: str,
) -> Benchmark:
    """`guidellm run` with four requests of synthetic text. `model` None leaves the choice to guidellm, which takes
    the first of /v1/models; `backend` are more options of its backend, such as `request_format` and `stream`.

    Raises AssertionError with the end of what it printed if it ends with an error of its own."""
    report = folder / "benchmarks.json"
    options = {"kind": "openai_http", "target": url, "api_key": key, **backend}
    if model is not None:
        options["model"] = model
    command = [str(INSTALLED / NAME / "bin" / "guidellm"), "run"]
    command += ["--backend", ",".join(f"{name}={value}" for name, value in options.items())]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--profile", profile]
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command += ["--data", data, "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=offline_environment(),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return _read(json.loads(report.read_text()))


def _read(report: dict[str, Any]) -> Benchmark:
    (benchmark,) = report["benchmarks"]
    requests = benchmark["requests"]
    done, failed = requests["successful"], requests["errored"]
    return Benchmark(
        successful=len(done),
        errored=len(failed),
        incomplete=len(requests["incomplete"]),
        prompt_tokens=sum(int(request["input_metrics"]["text_tokens"] or 0) for request in done),
        output_tokens=sum(int(request["output_metrics"]["text_tokens"] or 0) for request in done),
        errors=tuple(sorted({str(request["info"]["error"]) for request in failed})),
    )


def offline_environment() -> dict[str, str]:
    """A client's environment: nothing of ours, and no model hub."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | quiet | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
