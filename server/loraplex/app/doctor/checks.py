"""`loraplex doctor`: what this machine, these settings and this data directory are fit for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from loraplex.adapters.admission.base_families import EXPERTS_SERVED
from loraplex.adapters.admission.base_model import is_of_expert, load_base_spec, locate_module_weights
from loraplex.adapters.end_tokens import read_end_tokens, read_not_followed
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.files import shown
from loraplex.app.base_model.served_tokenizer import serve_tokenizer
from loraplex.app.base_model.source import ensure_model
from loraplex.app.doctor import production, services
from loraplex.app.doctor.findings import Finding, fail, ok, warn
from loraplex.app.doctor.machine import EngineDevice, Machine, Port, read_machine
from loraplex.app.doctor.torch_checks import Answers, Questions
from loraplex.app.engine_settings import shared_values
from loraplex.app.output import Output
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import is_bucket
from loraplex.serving.text.processor import base_turn_ends

_MARKS = {"ok": "[green]ok[/]   ", "warn": "[yellow]warn[/] ", "fail": "[red]wrong[/]"}


TorchAnswers = Answers | Mapping[str, str]
"""The results for each of `torch_checks.NAMES`. Raises OSError with what is wrong."""


def examine(settings: Settings, out: Output) -> int:
    """Look at this machine and print a line for each check; 1 if any failed. Nothing that lasts is changed, except
    that the base model is fetched."""
    model = _Model(settings)
    torch = Answers(
        Questions(
            **shared_values(settings, Questions),
            model_dir=None if model.directory is None else str(model.directory),
        )
    )
    checks = checks_of(settings, read_machine(settings), torch, model.base)
    if settings.model:
        checks.append(("base model", lambda: model.examine(torch)))
    if (directory := model.directory) is not None:
        checks.append(("tokenizer", lambda: check_tokenizer(settings, directory)))
        checks.append(("end of a turn", lambda: check_ends(directory)))
        checks.append(("generation config", lambda: check_generation(directory)))
    return report(checks, out)


Check = tuple[str, Callable[[], Finding]]


def checks_of(
    settings: Settings, machine: Machine, torch: TorchAnswers, base: Callable[[], BaseSpec | None]
) -> list[Check]:
    """All checks but that of the model, by name, of a machine that was looked at. `base`: the model, None where it
    cannot be had."""
    checks: list[Check] = [
        ("python", lambda: ok(machine.python)),
        ("torch", lambda: ok(torch["torch"])),
        ("kernels", lambda: ok(torch["kernels"])),
        ("speculation", lambda: ok(torch["speculation"])),
        ("database", lambda: services.check_database(settings)),
        ("database clock", lambda: services.check_database_clock(settings)),
        ("redis", lambda: services.check_redis(settings)),
    ]
    if settings.redis_url:
        checks.append(("redis clock", lambda: services.check_redis_clock(settings)))
    if is_bucket(settings):
        checks.append(("bucket", lambda: services.check_bucket(settings)))
    checks += [
        ("memory", lambda: production.check_memory(settings, machine, find_device(settings, torch))),
        ("data directory", lambda: production.check_data_dir(settings, machine.data, held=machine.is_held)),
        ("artifact store", lambda: production.check_store(settings, machine.store, base())),
        ("secrets", lambda: production.check_secrets(settings, machine)),
        ("open files", lambda: production.check_open_files(settings, machine, find_device(settings, torch))),
        ("huge pages", lambda: production.check_huge_pages(machine)),
        ("time", lambda: production.check_time_sync(machine)),
        ("data port", lambda: _port(machine.data_port, machine)),
        ("admin port", lambda: _port(machine.admin_port, machine)),
    ]
    if machine.prefixes is not None:
        prefixes = machine.prefixes
        checks.append(
            ("prefix disk", lambda: production.check_prefix_disk(settings, prefixes, machine.prefix_bytes))
        )
    if machine.engine_port is not None:
        port = machine.engine_port
        checks.append(("engine port", lambda: _port(port, machine)))
    if settings.replicas != 1 or settings.max_replicas or settings.ray_address:
        checks.append(("engines", lambda: production.check_engines(settings, machine)))
    return checks


def find_device(settings: Settings, torch: TorchAnswers) -> EngineDevice:
    """The device that a start would take; the named one, or a CPU, where torch cannot say."""
    try:
        kind, _, total = torch["device"].partition(" ")
    except OSError:
        kind, total = settings.device, ""
    return EngineDevice("cuda", int(total or 0)) if kind == "cuda" else EngineDevice("cpu")


def report(checks: list[Check], out: Output) -> int:
    """Run and print them; 1 if any failed."""
    console = Console()
    results: list[dict[str, Any]] = []
    for name, check in checks:
        try:
            finding = check()
        except (LoraplexError, OSError) as error:
            finding = fail(str(error), "")
        results.append(
            {
                "name": name,
                "ok": finding.status != "fail",
                "status": finding.status,
                "detail": finding.found,
                "remedy": finding.remedy,
            }
        )
        if not out.as_json:
            mark = _MARKS[finding.status]
            console.print(f"{mark} {name}: {escape(finding.found)}", highlight=False, soft_wrap=True)
            if finding.remedy:
                console.print(f"      {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    all_ok = all(result["ok"] for result in results)
    if out.as_json:
        out.json({"ok": all_ok, "checks": results})
    return 0 if all_ok else 1


class _Model:
    """The base model of the settings, fetched if need be; `examine` says why it cannot be had."""

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self.directory: Path | None = None
        self._failure: Exception | None = None
        self._base: BaseSpec | None = None
        if settings.model:
            try:
                self.directory = ensure_model(settings.model)
            except (LoraplexError, OSError) as error:
                self._failure = error

    def base(self) -> BaseSpec | None:
        """None where there is none that can be served; `examine` says why."""
        if self.directory is None:
            return None
        try:
            return self._load(self.directory)
        except (LoraplexError, OSError):
            return None

    def examine(self, torch: TorchAnswers) -> Finding:
        if self._failure is not None:
            raise self._failure
        assert self.directory is not None
        how = torch["model"]
        base = self._load(self.directory)
        found = f"{how}, {base.num_layers} layers, {len(base.sites)} sites, {base.fingerprint[:12]}"
        if base.model_type not in EXPERTS_SERVED and any(map(is_of_expert, locate_module_weights(base))):
            found += ", LoRA on its routed experts is not served (on the other linears it is)"
        if untested := torch["untested"]:
            return warn(
                found,
                f"{untested} is not on the list of tested architectures: the start compares it with transformers "
                "on its own weights, and refuses it if they differ. Start the server once before you rely on it",
            )
        return ok(found)

    def _load(self, directory: Path) -> BaseSpec:
        """Read once. Raises BaseModelInvalid."""
        if self._base is None:
            self._base = load_base_spec(directory, cache_dir=self._data_dir)
        return self._base


def check_tokenizer(settings: Settings, model_dir: Path) -> Finding:
    found = serve_tokenizer(model_dir, settings.tokenizer, settings.data_dir)
    if found.warning:
        return warn(found.warning, "choose --tokenizer by what your adapters were trained with")
    if not found.name:
        return fail("the base model has no tokenizer.json", "give --model a directory that has one")
    return ok(f"tokenizer.json and transformers' {found.name} give the same tokens")


def check_ends(model_dir: Path) -> Finding:
    """The tokens that end an answer, with the sources that say so. Raises LoraplexError."""
    ends = read_end_tokens(model_dir, base_turn_ends(model_dir))
    if not ends.found:
        return warn(
            ends.warning or "no token",
            "no file of the model names one: answers end at max_tokens and stop alone",
        )
    told = "; ".join(f"{shown(end.token)} ({end.id}: {', '.join(end.sources)})" for end in ends.found)
    if ends.warning:
        return warn(
            told, f"the model's files disagree, and each of these tokens ends an answer: {ends.warning}"
        )
    return ok(told)


def check_generation(model_dir: Path) -> Finding:
    """The settings of generation_config.json that no answer follows. Raises LoraplexError."""
    asked = read_not_followed(model_dir)
    if asked is None:
        return ok("it asks for nothing but tokens that end a turn")
    if asked.of_none:
        return warn(
            asked.told, "answers are made without it; ask by a request's own options for what is like it"
        )
    return ok(asked.told)


def _port(port: Port, machine: Machine) -> Finding:
    if not port.obstacle:
        return ok(f"{port.address} is free")
    if port.is_in_use and machine.is_held:
        return ok(f"{port.address} is in use, and so is the data directory: a server runs")
    return fail(
        f"{port.address} cannot be used: {port.obstacle}", "stop what uses it, or choose another port"
    )
