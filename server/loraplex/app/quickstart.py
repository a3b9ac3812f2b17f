"""`loraplex quickstart`: from nothing to a mixed batch on a real model, through the public doors only.

The server runs as a child process with its embedded defaults. Everything else here is a client of its HTTP
interface, as an operator's and a tenant's own scripts would be. A second run reuses model, database, key and
adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.adapters.errors import LoraplexError
from loraplex.app.base_model.source import default_served_name, ensure_model
from loraplex.app.start_watch import await_ready
from loraplex.app.storage.data_dir_lock import is_data_dir_locked, make_data_dir
from loraplex.app.transfer_bar import transfer_bar
from loraplex.control.types import SCOPES

TENANT = "demo"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
STOPPED_EXIT_CODE = 130  # a shell's code for Ctrl-C


class QuickstartFailed(LoraplexError):
    """A step of the demonstration failed; the message names the step and what to do."""

    code = "quickstart_failed"


@dataclass(frozen=True, slots=True)
class QuickstartOptions:
    """`adapters_dir` holds one PEFT directory an adapter; `exit_after` stops the server after the answers."""

    model: str
    adapters_dir: Path
    data_dir: Path
    host: str
    port: int
    admin_port: int
    question: str
    max_tokens: int
    exit_after: bool


def run_quickstart(options: QuickstartOptions, console: Console) -> int:
    """The exit code: 0 only if every answer came."""
    adapters = _example_adapters(options.adapters_dir)
    _require_free(options)
    console.print(f"[bold]1/5[/] base model {options.model}")
    # At a terminal alone: bars are drawn on stderr, beside the lines.
    bar = partial(transfer_bar, is_quiet=False) if console.is_terminal else None
    model_dir = ensure_model(options.model, lambda line: console.print(f"    {line}"), bar)
    console.print(
        f"    in {escape(str(model_dir))}: adapters are trained on it", highlight=False, soft_wrap=True
    )
    console.print("[bold]2/5[/] starting the server")
    with _stopped_by_signals() as stop, _server(options, model_dir, stop) as server:
        url = f"http://{options.host}:{options.port}/readyz"
        await_ready(url, console, lambda: _check_server(options, server, stop))
        console.print(
            f"    data plane http://{options.host}:{options.port}, admin plane http://{options.host}:{options.admin_port}"
        )
        with httpx.Client(base_url=f"http://{options.host}:{options.admin_port}", timeout=120) as admin:
            admin.headers["authorization"] = f"Bearer {_admin_token(options.data_dir)}"
            console.print(f"[bold]3/5[/] tenant '{TENANT}' and its key")
            key = _tenant_and_key(admin, options)
            console.print("[bold]4/5[/] uploading the example adapters through the admin API")
            for name, folder in adapters.items():
                stop.check()
                console.print(f"    {_upload(admin, name, folder)}")
        stop.check()
        console.print("[bold]5/5[/] one question to the base model and every adapter, in one mixed batch")
        models = [default_served_name(options.model), *adapters]
        answers = asyncio.run(_ask_all(options, key, models))
        _show(console, options, key, answers)
        failed = [name for name, answer in answers.items() if answer.error]
        if failed:
            raise QuickstartFailed(
                f"no answer from {', '.join(failed)}; the server's log is {_log_path(options)}"
            )
        if not options.exit_after:
            _show_next(console, options, list(adapters))
            console.print("\nThe server stays up; Ctrl-C stops it.")
            stop.check()
            _wait(server)
    return 0


def example_adapters_dir() -> Path:
    """The adapters that a wheel carries inside of the package, and a checkout in its `examples`."""
    here = Path(__file__).resolve()
    packaged = here.with_name("example_adapters")
    return packaged if packaged.is_dir() else here.parents[3] / "examples" / "adapters"


def _example_adapters(folder: Path) -> dict[str, Path]:
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/adapter_config.json"))}
    if not found:
        raise QuickstartFailed(
            f"{folder} holds no adapters; --adapters-dir names a folder with one PEFT directory an adapter."
        )
    return found


def _require_free(options: QuickstartOptions) -> None:
    """Raises QuickstartFailed, with ports that are free, or where a server already uses the data directory."""
    taken = {
        port: reason
        for port in (options.port, options.admin_port)
        if (reason := _obstacle(options.host, port)) is not None
    }
    is_held = is_data_dir_locked(options.data_dir)
    if not taken and not is_held:
        return
    found = [f"port {port} on {options.host} cannot be used ({why})" for port, why in taken.items()]
    arguments = []
    if taken:
        arguments.append("--port {} --admin-port {}".format(*_free_ports(options.host)))
    if is_held:
        found.append(f"a server uses the data directory {options.data_dir}")
        arguments.append(f"--data-dir {shlex.quote(str(options.data_dir) + '-2')}")
    raise QuickstartFailed(
        f"{', and '.join(found)}: stop what runs there, or say: {_again(' '.join(arguments))}"
    )


def _obstacle(host: str, port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _free_ports(host: str) -> tuple[int, int]:
    """Two that nobody uses now. 0 where the host itself cannot be bound, which the message names."""
    with socket.socket() as one, socket.socket() as other:
        with contextlib.suppress(OSError):
            one.bind((host, 0))
            other.bind((host, 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])


def _log_path(options: QuickstartOptions) -> Path:
    return options.data_dir / "server.log"


class _Stop:
    """Handles SIGTERM and SIGHUP: they stop as Ctrl-C does, but not while the server is being started. A process whose
    start is cut short by an exception is left behind: it would run unnoticed.

    They raise SystemExit. Of a KeyboardInterrupt that comes while an import defines a dataclass, Python remembers that
    it came, and ends `python -m` with SIGINT in place of the exit code. Python drops what is raised while it frees an
    object, as it does at any time: so what has come is looked at again by `check`."""

    def __init__(self) -> None:
        self._is_held = False
        self._has_come = False

    def __call__(self, _signal: int, _frame: object) -> None:
        self._has_come = True
        if not self._is_held:
            raise SystemExit(STOPPED_EXIT_CODE)

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        """Raises SystemExit if a signal has come since `hold`."""
        self._is_held = False
        self.check()

    def check(self) -> None:
        """Raises SystemExit if a signal has come."""
        if self._has_come:
            raise SystemExit(STOPPED_EXIT_CODE)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    """SIGTERM and a closed terminal (SIGHUP) stop as Ctrl-C does, so that no server stays behind. nohup's SIGHUP stays
    ignored."""
    stop = _Stop()
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stop
    except Exception:
        # Python up to 3.11 makes a RuntimeError of what `__set_name__` raises while a class is defined.
        stop.check()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _server(options: QuickstartOptions, model_dir: Path, stop: _Stop) -> Iterator[subprocess.Popen[bytes]]:
    make_data_dir(options.data_dir)
    command = [sys.executable, "-m", "loraplex.app.cli", "serve", "--model", str(model_dir)]
    command += [
        "--served-model-name",
        default_served_name(options.model),
        "--data-dir",
        str(options.data_dir),
    ]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--admin-host", options.host, "--admin-port", str(options.admin_port)]
    # A grace period is for load balancers; here it would only delay Ctrl-C.
    command += ["--drain-grace", "0"]
    # Its owner's alone: the first start shows the admin token there.
    log_fd = os.open(_log_path(options), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    child: subprocess.Popen[bytes] | None = None
    try:
        stop.hold()
        with open(log_fd, "ab") as log:
            # Its own process group, so that Ctrl-C reaches the server once, as the drain that we ask for.
            child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
        stop.release()
        yield child
    finally:
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(timeout=75)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _check_server(options: QuickstartOptions, server: subprocess.Popen[bytes], stop: _Stop) -> None:
    """Raises SystemExit after a signal, QuickstartFailed with the server's own last word where it has ended."""
    stop.check()
    if server.poll() is not None:
        raise QuickstartFailed(f"the server ended with {server.returncode}: {_last_line(_log_path(options))}")


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"see {path}"


def _admin_token(data_dir: Path) -> str:
    given = os.environ.get("LORAPLEX_ADMIN_TOKEN")
    return given or (data_dir / "admin-token").read_text().strip()


def _checked(answer: httpx.Response, what: str, *allowed: int) -> httpx.Response:
    if answer.status_code in allowed:
        return answer
    try:
        reason = answer.json().get("detail", answer.text)
    except ValueError:
        reason = answer.text
    raise QuickstartFailed(f"{what} failed with {answer.status_code}: {reason}")


def _tenant_and_key(admin: httpx.Client, options: QuickstartOptions) -> str:
    created = admin.post("/admin/v1/tenants", json={"id": TENANT, "display_name": "Quickstart"})
    _checked(created, "creating the tenant", 201, 409)
    kept = options.data_dir / "quickstart-key"
    if kept.is_file():
        key = kept.read_text().strip()
        answer = httpx.get(
            f"http://{options.host}:{options.port}/v1/models", headers={"authorization": f"Bearer {key}"}
        )
        if answer.status_code == 200:
            return key
    made = admin.post(f"/admin/v1/tenants/{TENANT}/keys", json={"name": "quickstart", "scopes": SCOPES})
    key = str(_checked(made, "creating the key", 201).json()["secret"])
    with open(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(key + "\n")
    return key


def _upload(admin: httpx.Client, name: str, folder: Path) -> str:
    with contextlib.ExitStack() as stack:
        files = {
            part: (part, stack.enter_context(open(folder / part, "rb")))
            for part in ("adapter_config.json", "adapter_model.safetensors")
        }
        answer = admin.post(f"/admin/v1/tenants/{TENANT}/adapters/{name}/versions", files=files)
    body = _checked(answer, f"uploading '{name}'", 200, 201).json()
    known = "already there as" if answer.status_code == 200 else "accepted as"
    targets = ", ".join(body["targets"])
    return (
        f"{name}: {known} {body['version']}, rank {body['rank']} on {targets}, {body['bytes'] / 1e6:.2f} MB"
    )


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    text: str = ""
    error: str = ""
    adapter: str = ""
    tokens: int = 0


async def _ask_all(options: QuickstartOptions, key: str, models: list[str]) -> dict[str, FirstAnswer]:
    async with httpx.AsyncClient(
        base_url=f"http://{options.host}:{options.port}",
        headers={"authorization": f"Bearer {key}"},
        timeout=300,
    ) as client:
        answers = await asyncio.gather(*(_ask(client, options, model) for model in models))
    return dict(zip(models, answers, strict=True))


def _request_body(options: QuickstartOptions, model: str) -> dict[str, object]:
    messages = [{"role": "user", "content": options.question}]
    return {"model": model, "messages": messages, "max_tokens": options.max_tokens, "temperature": 0}


async def _ask(client: httpx.AsyncClient, options: QuickstartOptions, model: str) -> FirstAnswer:
    try:
        answer = await client.post("/v1/chat/completions", json=_request_body(options, model))
        body = answer.json()
        if answer.status_code != 200:
            return FirstAnswer(error=f"{answer.status_code}: {body['error']['message']}")
    except (httpx.HTTPError, ValueError) as error:
        return FirstAnswer(error=str(error) or type(error).__name__)
    text = str(body["choices"][0]["message"]["content"]).strip()
    served = answer.headers.get("x-loraplex-adapter", "base")
    return FirstAnswer(text=text, adapter=served, tokens=int(body["usage"]["completion_tokens"]))


def _show(console: Console, options: QuickstartOptions, key: str, answers: dict[str, FirstAnswer]) -> None:
    table = Table(title=f"“{escape(options.question)}”", show_lines=True, title_justify="left")
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("served by", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for model, answer in answers.items():
        shown = f"[red]{escape(answer.error)}[/]" if answer.error else escape(answer.text)
        table.add_row(model, answer.adapter, shown)
    console.print(table)
    body = shlex.quote(json.dumps(_request_body(options, list(answers)[-1]), ensure_ascii=False))
    console.print("Ask again yourself:")
    console.print(
        f"curl http://{options.host}:{options.port}/v1/chat/completions \\\n"
        f"  -H 'Authorization: Bearer {key}' \\\n  -H 'Content-Type: application/json' \\\n  -d {body}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _show_next(console: Console, options: QuickstartOptions, adapters: list[str]) -> None:
    """Show what to do in a second terminal, and where the ports come from."""
    key_file = shlex.quote(str((options.data_dir / "quickstart-key").absolute()))
    program = shlex.quote(_program())
    lines = [
        "",
        f"In a second terminal, as the tenant '{TENANT}':",
        f"  export LORAPLEX_URL=http://{options.host}:{options.port} LORAPLEX_API_KEY=$(cat {key_file})",
        f'  {program} chat -m {"pirate" if "pirate" in adapters else adapters[0]} "Who are you?"',
        f"  {program} adapter push NAME DIR    # a folder that PEFT's save_pretrained wrote",
        "As the operator:",
        f"  export LORAPLEX_ADMIN_URL=http://{options.host}:{options.admin_port} "
        f"LORAPLEX_DATA_DIR={shlex.quote(str(options.data_dir.absolute()))}",
        f"  {program} tenant create acme",
        f"In a browser: http://{options.host}:{options.port}/console with that key; as the operator "
        f"http://{options.host}:{options.admin_port} with the token of {_admin_token_place(options)}",
        f"Ports: {options.port} is the tenants', {options.admin_port} the operators'. For others: "
        f"{_again('--port PORT --admin-port PORT')}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _admin_token_place(options: QuickstartOptions) -> str:
    if os.environ.get("LORAPLEX_ADMIN_TOKEN"):
        return "LORAPLEX_ADMIN_TOKEN"
    return shlex.quote(str((options.data_dir / "admin-token").absolute()))


def _program() -> str:
    """`loraplex` where the shell finds this installation's, else its path."""
    here = Path(sys.executable).with_name("loraplex")
    found = shutil.which("loraplex")
    if found is not None and Path(found).resolve() == here.resolve():
        return "loraplex"
    return str(here)


def _again(arguments: str) -> str:
    """The command that was run, with `arguments`."""
    made = "MAKELEVEL" in os.environ
    return f'make quickstart ARGS="{arguments}"' if made else f"loraplex quickstart {arguments}"


def _wait(server: subprocess.Popen[bytes]) -> None:
    """Wait until the server ends by itself or this command is stopped."""
    try:
        server.wait()
    except (KeyboardInterrupt, SystemExit):
        return
    raise QuickstartFailed(f"the server ended with {server.returncode}; see its log")
