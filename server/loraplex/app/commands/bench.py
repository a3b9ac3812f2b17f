"""`loraplex bench`: put load on a running server and say how it bore it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loraplex.app.bench.client import Asking, Endpoint, Outcome
from loraplex.app.bench.load import Load, Run, run_load
from loraplex.app.bench.report import report, tables
from loraplex.app.bench.workload import Distribution, Unit, Workload
from loraplex.app.commands.shared.client import http_options, refused, unreachable
from loraplex.app.commands.shared.errors import CommandFailed, json_failures
from loraplex.app.commands.shared.options import DEFAULT_URL, ApiKeyOption, JsonOption, UrlOption
from loraplex.app.output import Output

DEFAULT_REQUESTS = 100


def bench(
    api_key: ApiKeyOption,
    url: UrlOption = DEFAULT_URL,
    adapters: Annotated[
        str | None, typer.Option(help="Models to ask, separated by commas (default: the base model)")
    ] = None,
    distribution: Annotated[
        Distribution, typer.Option(help="How requests are shared among them: the first only, alike, or Zipf")
    ] = "uniform",
    zipf_alpha: Annotated[float, typer.Option(min=0, help="The k-th model weighs 1/k^alpha")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: workers that ask again once answered [1]")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: mean requests a second of Poisson arrivals")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests to send [100, if there is no --duration]")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send for")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests a model before, not counted")] = 0,
    endpoint: Annotated[Endpoint, typer.Option(help="completions or chat")] = "completions",
    input_len: Annotated[int, typer.Option(min=1, help="Length of a prompt, in words or tokens")] = 64,
    input_unit: Annotated[
        Unit, typer.Option(help="words of text, or tokens: ids below --vocab-size (completions only)")
    ] = "words",
    shared_prefix_len: Annotated[
        int, typer.Option(min=0, help="How much of the prompt is the same in all requests")
    ] = 0,
    vocab_size: Annotated[int, typer.Option(min=1001, help="For --input-unit tokens")] = 30_000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate a request")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Always generate all of them")] = True,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence that end a request")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed: same arrivals, models and prompts")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Put load on a running server; print latencies and throughput."""
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("a closed loop (--concurrency) or Poisson arrivals (--rate), not both")
    for option, value in (("--rate", rate), ("--duration", duration)):
        if value is not None and not 0 < value < float("inf"):
            raise typer.BadParameter(f"{option} must be above 0")
    if input_unit == "tokens" and endpoint == "chat":
        raise typer.BadParameter("a chat prompt is text: --input-unit tokens needs --endpoint completions")
    if num_requests is None and duration is None:
        num_requests = DEFAULT_REQUESTS
    out = Output(as_json)
    with json_failures(out):
        options = http_options(url, api_key) | {
            "timeout": httpx.Timeout(timeout, connect=30.0, pool=None),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        }
        asking = Asking(endpoint, max_tokens, ignore_eos, temperature)
        load = Load(concurrency or 1, num_requests, duration, warmup)
        known = _models(options)
        models = _chosen(adapters, known)
    workload = Workload(
        models=models,
        distribution=distribution,
        zipf_alpha=zipf_alpha,
        rate=rate,
        input_len=input_len,
        shared_prefix_len=shared_prefix_len,
        unit=input_unit,
        vocab_size=vocab_size,
        seed=seed,
    )
    run = asyncio.run(_run(options, workload, load, asking))
    figures = {"options": _options(url, workload, load, asking)} | report(run)
    if as_json:
        out.json(figures)
    else:
        out.render(*tables(figures))
    if figures["completed"] == 0:
        raise CommandFailed("no request was answered; see the errors above.")


def _models(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The cards of what the key may use; also the first sign of a server that is not there or a wrong key."""
    url = str(options["base_url"])
    with httpx.Client(**options) as client:
        try:
            response = client.get("/v1/models")
            body = response.json()
        except httpx.HTTPError as error:
            raise unreachable(url, error, "--url") from error
        except ValueError as error:
            raise CommandFailed(f"{url} answered with something that is not JSON; is it Loraplex?") from error
    if response.status_code != 200:
        raise refused(response.status_code, body, key_option="--api-key")
    return list(body["data"])


def _chosen(adapters: str | None, known: list[dict[str, Any]]) -> tuple[str, ...]:
    if adapters is not None:
        chosen = tuple(name.strip() for name in adapters.split(",") if name.strip())
        if not chosen:
            raise CommandFailed("--adapters names no model.")
        return chosen
    base = [card["id"] for card in known if not card.get("parent")]
    if not base:
        raise CommandFailed("this key may not use the base model; say with --adapters which models to ask.")
    return (base[0],)


async def _run(options: dict[str, Any], workload: Workload, load: Load, asking: Asking) -> Run:
    async with httpx.AsyncClient(**options) as client:
        console = Console(stderr=True)
        columns = (
            TextColumn("asking"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]} failed"),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("", total=load.num_requests, failed=0)
            failed = 0

            def on_done(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.error is not None
                progress.update(task, advance=1, failed=failed)

            return await run_load(client, workload, load, asking, on_done)


def _options(url: str, workload: Workload, load: Load, asking: Asking) -> dict[str, Any]:
    """The options of a run, so that a result can be repeated."""
    return {
        "url": url,
        "loop": "closed" if workload.rate is None else "poisson",
        "concurrency": load.concurrency if workload.rate is None else None,
        "rate": workload.rate,
        "num_requests": load.num_requests,
        "duration_s": load.duration_s,
        "warmup": load.warmup,
        "models": list(workload.models),
        "distribution": workload.distribution,
        "zipf_alpha": workload.zipf_alpha if workload.distribution == "zipf" else None,
        "endpoint": asking.endpoint,
        "input_len": workload.input_len,
        "input_unit": workload.unit,
        "shared_prefix_len": workload.shared_prefix_len,
        "max_tokens": asking.max_tokens,
        "ignore_eos": asking.ignore_eos,
        "temperature": asking.temperature,
        "seed": workload.seed,
    }
