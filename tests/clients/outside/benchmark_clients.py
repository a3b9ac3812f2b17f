"""guidellm and lm-eval with their own command lines, each call a row: what was asked, whether it went well, why not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from clients.outside.servers import example_adapters, model_directory, shop
from support.clients import guidellm, lm_eval
from support.clients.outside_clients import INSTALLED
from support.servers.live_server import EXAMPLE_ADAPTERS, SERVED_NAME, Shop

GUIDELLM_CASES: tuple[tuple[str, str | None, str, dict[str, str]], ...] = (
    ("chat, streamed (its default), an adapter", "pirate", "kind=synchronous", {}),
    ("chat, streamed, the base, two at a time", SERVED_NAME, "kind=concurrent,streams=2", {}),
    ("chat, streamed, the first of /v1/models", None, "kind=synchronous", {}),
    ("chat, not streamed, an adapter", "pirate", "kind=synchronous", {"stream": "false"}),
    ("text, streamed, an adapter", "pirate", "kind=synchronous", {"request_format": "/v1/completions"}),
    ("responses, streamed, an adapter", "pirate", "kind=synchronous", {"request_format": "/v1/responses"}),
    ("embeddings, the base", SERVED_NAME, "kind=synchronous", {"request_format": "/v1/embeddings"}),
)
NEAR = 1e-3
"""Two likelihoods of one text in float32 by two implementations."""


def run(part: str, work: Path) -> dict[str, Any]:
    """The version and the rows of `part`, "guidellm" or "lm_eval", against a server with the example adapters."""
    with tempfile.TemporaryDirectory(prefix="servers-", dir=work) as name:
        folder = Path(name)
        with shop(folder, SERVED_NAME, example_adapters()) as place:
            rows = _guidellm(place, folder) if part == guidellm.NAME else _lm_eval(place, folder)
    return {"version": _version(part), "rows": rows}


def _version(client: str) -> str:
    (site,) = (INSTALLED / client).glob("lib/python3*/site-packages")
    (found,) = (
        dist.version for dist in distributions(path=[str(site)]) if dist.name.replace("-", "_") == client
    )
    return found


def _row(case: str, ask: Callable[[], str]) -> dict[str, str]:
    """`ask` returns why it went wrong, or nothing."""
    try:
        why = ask()
    except AssertionError as error:
        why = str(error).strip().splitlines()[-1][:300]
    print(case, why or "passed", flush=True)
    return {"case": case, "kind": "unexplained" if why else "passed", "why": why}


def _guidellm(place: Shop, folder: Path) -> list[dict[str, str]]:
    def asking(model: str | None, profile: str, backend: dict[str, str]) -> str:
        done = guidellm.benchmark(
            place.server.data_url, place.key, model, model_directory(), folder, profile=profile, **backend
        )
        if (
            done.successful == guidellm.REQUESTS
            and done.output_tokens == done.successful * guidellm.OUTPUT_TOKENS
        ):
            return ""
        return " ".join(done.errors) or f"{done}"

    return [
        _row(case, lambda case=(model, profile, backend): asking(*case))  # type: ignore[misc]
        for case, model, profile, backend in GUIDELLM_CASES
    ]


def _lm_eval(place: Shop, folder: Path) -> list[dict[str, str]]:
    own: dict[str, dict[str, list[Any]]] = {}

    def completions(model: str, **options: object) -> str:
        arguments: dict[str, object] = {"base_url": f"{place.server.data_url}/v1/completions"}
        if "tokenizer_backend" not in options:
            arguments["tokenizer"] = model_directory()
        told = lm_eval.evaluate(
            folder / "-".join([model.replace("/", "-"), *options]),
            "local-completions",
            {"model": model, **arguments, **options},
            list(lm_eval.TASKS),
            key=place.key,
        )
        if model not in own:
            peft = {} if model == SERVED_NAME else {"peft": EXAMPLE_ADAPTERS / model}
            own[model] = lm_eval.evaluate(
                folder / f"own-{len(own)}",
                "hf",
                {"pretrained": model_directory(), "dtype": "float32", **peft},
                list(lm_eval.TASKS),
                "--device",
                "cpu",
            )
        return difference(told, own[model])

    def chats(model: str) -> str:
        told = lm_eval.evaluate(
            folder / f"{model.replace('/', '-')}-chat",
            "local-chat-completions",
            {"model": model, "base_url": f"{place.server.data_url}/v1/chat/completions"},
            [lm_eval.GENERATE],
            "--apply_chat_template",
            key=place.key,
        )
        return "" if all(told[lm_eval.GENERATE]) else "an empty answer"

    return [
        _row("local-completions, the base", lambda: completions(SERVED_NAME)),
        _row("local-completions, an adapter", lambda: completions("pirate")),
        _row(
            "local-completions, an adapter, four at a time", lambda: completions("pirate", num_concurrent=4)
        ),
        _row(
            "local-completions, the server's tokenizer",
            lambda: completions("pirate", tokenizer_backend="remote", auth_token=place.key),
        ),
        _row("local-chat-completions, the base", lambda: chats(SERVED_NAME)),
        _row("local-chat-completions, an adapter", lambda: chats("pirate")),
    ]


def difference(told: dict[str, list[Any]], own: dict[str, list[Any]]) -> str:
    """Between two runs' answers; nothing where likelihoods are near and texts the same."""
    numbers = [
        abs(mine - theirs)
        for task in (lm_eval.CHOICE, lm_eval.ROLLING)
        for mine, theirs in zip(_flat(told[task]), _flat(own[task]), strict=True)
    ]
    if max(numbers) > NEAR:
        return f"likelihoods differ by up to {max(numbers):.2g}"
    same = told[lm_eval.GENERATE] == own[lm_eval.GENERATE]
    return "" if same else f"{told[lm_eval.GENERATE]} and not {own[lm_eval.GENERATE]}"


def _flat(values: list[Any]) -> list[float]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]
