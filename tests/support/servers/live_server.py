"""The whole product as an operator runs it: `loraplex serve` as a process of its own, with its engine process.

Nothing here reaches into the server: it is seen through its two ports, its log, its data directory and signals.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai
import psutil

from support.adapters.drafts import TinyBase, make_adapter, write_base
from support.models.byte_tokenizer import write_byte_tokenizer

SERVE = (sys.executable, "-m", "loraplex.app.cli", "serve")
ENGINE_MODULE = "loraplex.engine.ipc.process"
SPARE_NAME = "engine-spare"
START_TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE_ADAPTERS = REPOSITORY / "examples" / "adapters"
EXAMPLES = ("json", "pirate", "sentiment")
SERVED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = {"kv_cache_memory": "512MiB", "adapter_memory": "256MiB", "adapter_cpu_memory": "256MiB"}
"""Memory for the real model beside other work."""
TINY_SIZES = {"kv_cache_memory": "64MiB", "adapter_memory": "16MiB", "adapter_cpu_memory": "16MiB"}
TINY_TORCH = TINY_SIZES | {"kernels": "torch"}
"""For tests of what is around an engine: it starts in half the processor time where it reads no compiled kernels."""
TINY = TinyBase(vocab=260)
"""With support.models.byte_tokenizer's vocabulary."""
SMOLLM2 = TinyBase(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without any LORAPLEX_ setting but the model cache, without the tests' own choice of
    threads and what make sets, and with `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "MAKELEVEL")
        and (not name.startswith("LORAPLEX_") or name == "LORAPLEX_MODEL_CACHE")
    }
    return kept | dict(extra or {})


def importable_tests() -> str:
    """PYTHONPATH for a process that imports `support`."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(REPOSITORY / "tests"), *filter(None, [given])])


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses; held together, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def write_tiny_model(directory: Path, *, positions: int = 1 << 17) -> Path:
    """A whole model directory of a few kilobytes that loads in a moment. `positions` is its longest sequence."""
    write_base(directory, TINY)
    config = json.loads((directory / "config.json").read_text())
    config |= {"max_position_embeddings": positions, "eos_token_id": 256, "bos_token_id": 257}
    (directory / "config.json").write_text(json.dumps(config))
    return write_byte_tokenizer(directory)


def write_tiny_adapter(directory: Path, **options: Any) -> Path:
    """An adapter for `write_tiny_model`; options as for support.adapters.drafts.draft_adapter."""
    make_adapter(directory, TINY, **options)
    return directory


def write_real_adapter(directory: Path, **options: Any) -> Path:
    """A random adapter for the real model; options as for support.adapters.drafts.draft_adapter."""
    make_adapter(directory, SMOLLM2, **{"scale": 0.02, **options})
    return directory


class LiveServer:
    """`loraplex serve` on free ports. Settings are given as keywords of `Settings`' names.

    A context manager that starts the server and waits until it is ready; it is always reaped, engine included.
    `start` after a `kill` or `stop` is a restart on the same data directory and the same ports.
    No spare of the engine is kept: it would load its libraries beside every test.
    """

    def __init__(
        self,
        model: Path | str,
        data_dir: Path,
        *,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + "-server.log")
        self.data_port, self.admin_port = free_ports(2)
        given = {
            "model": model,
            "data_dir": data_dir,
            "port": self.data_port,
            "admin_port": self.admin_port,
            "drain_grace": 0,
            "threads": 1,
            "engine_spare": False,
            **settings,
        }
        self.command = list(SERVE)
        for name, value in given.items():
            self.command += [f"--{name.replace('_', '-')}", str(value)]
        self.environment = clean_environment(environment)
        self.data_url = f"http://127.0.0.1:{self.data_port}"
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: httpx.Client | None = None

    # Its life.

    def start(self, *, wait: bool = True) -> LiveServer:
        assert self._process is None or self._process.poll() is not None, "it runs already"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        # A start takes seconds, and each question keeps the processor from it.
        self.wait(lambda: self.get("/readyz") == 200, timeout, every=0.15)

    def wait(self, condition: Callable[[], bool], timeout: float = 60.0, *, every: float = 0.03) -> None:
        """Until `condition` holds; fails with the log's end if it does not, or if the server has ended."""
        end = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout} s: {condition}\n{self.log_tail()}")
            time.sleep(every)

    def stop(self, timeout: float = 90.0) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit(timeout)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout: float = 90.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout} s:\n{self.log_tail()}") from None

    def kill(self) -> None:
        """SIGKILL, and wait until the engine has gone too: nothing of the server is left."""
        engine = self.engine_pid()
        self.process.kill()
        self.process.wait(30)
        if engine is not None:
            wait_gone(engine)

    def reap(self) -> None:
        """Whatever happened, nothing of the server is left afterwards."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is None:
            return
        family = self._family()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self._process.kill()
        self._process.wait(30)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=60)

    def __enter__(self) -> LiveServer:
        try:
            return self.start()
        except BaseException:
            self.reap()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reap()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def engine_pid(self) -> int | None:
        """The engine process, while there is one: the last that got ready, else one that starts."""
        alive: dict[int, list[str]] = {}
        for child in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive[child.pid] = child.cmdline()
        for started in reversed(self.logged("engine_started")):
            if started["pid"] in alive:
                return int(started["pid"])
        return next(
            (pid for pid, given in alive.items() if ENGINE_MODULE in given and "--socket" in given), None
        )

    def spare_is_ready(self) -> bool:
        """A process stands by to become the next engine, and has imported what it needs."""
        for child in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == SPARE_NAME:
                    return True
        return False

    def kill_engine(self) -> int:
        """SIGKILL to the engine process; the process id that it had."""
        engine = self.engine_pid()
        assert engine is not None, "there is no engine process"
        os.kill(engine, signal.SIGKILL)
        return engine

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log lines of this event, since the first start."""
        found = []
        for line in self.log_path.read_text(errors="replace").splitlines():
            if event not in line:  # asked again and again of logs that have a line for each request
                continue
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == event:
                    found.append(entry)
        return found

    # What it says of itself.

    def get(self, path: str, *, admin: bool = False) -> int | None:
        """The status of an unauthenticated GET; None where nobody answers."""
        # Asked again and again while it starts: httpx takes ten times as long.
        port = self.admin_port if admin else self.data_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    @property
    def admin_token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    @property
    def admin(self) -> httpx.Client:
        """A client of the admin plane with the admin token."""
        if self._admin is None:
            self._admin = httpx.Client(base_url=f"{self.admin_url}/admin/v1/", timeout=120)
            self._admin.headers["authorization"] = f"Bearer {self.admin_token}"
        return self._admin

    def engine(self) -> dict[str, Any]:
        return checked(self.admin.get("engine"))

    def stats(self) -> dict[str, Any]:
        """The engine's gauges; fails while no engine answers."""
        stats = self.engine()["stats"]
        assert isinstance(stats, dict), "no engine answers"
        return stats

    def residency(self) -> dict[str, list[str]]:
        """NAME@vN → the tiers that hold it."""
        rows = checked(self.admin.get("cache", params={"limit": 100}))["data"]
        return {f"{row['name']}@{row['version']}": row["residency"] for row in rows}

    def idle(self) -> bool:
        """Nothing runs, waits, is leased or holds a KV block."""
        stats = self.stats()
        held = ("num_running", "num_waiting", "num_leases", "num_kv_blocks_used")
        return not any(stats[name] for name in held)

    # What an operator does.

    def create_tenant(self, tenant: str, **fields: Any) -> None:
        checked(self.admin.post("tenants", json={"id": tenant, **fields}), 201)

    def create_key(self, tenant: str, **fields: Any) -> str:
        """The secret."""
        return str(checked(self.admin.post(f"tenants/{tenant}/keys", json=fields), 201)["secret"])

    def upload(self, tenant: str, name: str, folder: Path) -> dict[str, Any]:
        files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
        answer = post_version(self.admin, f"tenants/{tenant}/adapters/{name}/versions", files)
        return dict(checked(answer, 201, 200))

    # What a tenant does.

    def client(self, key: str, **options: Any) -> httpx.Client:
        return httpx.Client(
            base_url=self.data_url, headers={"authorization": f"Bearer {key}"}, **{"timeout": 120, **options}
        )


@dataclass(frozen=True)
class Shop:
    """A server with a tenant that has adapters, and a key of its."""

    server: LiveServer
    key: str
    tenant: str = "acme"

    def openai(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """The official client, which tries nothing twice."""
        url = f"{self.server.data_url}/v1"
        return openai.OpenAI(base_url=url, api_key=key or self.key, max_retries=0, timeout=240, **options)

    def client(self) -> httpx.Client:
        return self.server.client(self.key)


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def post_version(client: httpx.Client, path: str, files: Mapping[str, Any], **fields: Any) -> httpx.Response:
    """The answer to an upload once its numbers are checked. The server waits 30 s for an engine that is held up, and
    then says to send the same files again."""
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        answer = client.post(path, files=files, data=fields)
        is_busy = answer.status_code == 503 and answer.json().get("code") == "numbers_unchecked"
        if not is_busy or time.monotonic() > end:
            return answer


def checked(answer: httpx.Response, *allowed: int) -> Any:
    """The JSON of an answer that has one of these statuses (200)."""
    assert answer.status_code in (allowed or (200,)), f"{answer.status_code}: {answer.text}"
    return answer.json() if answer.content else None


def wait_gone(pid: int, timeout: float = 60.0) -> None:
    """Until no process has this id, or it is only waited for."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there after {timeout} s")


def run_serve(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 120.0
) -> Outcome:
    """`loraplex serve` with these arguments, to its own end; for starts that must fail."""
    return run_command([*SERVE, *arguments], environment=environment, timeout=timeout)


def run_command(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = 120.0
) -> Outcome:
    done = subprocess.run(
        list(command),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean_environment(environment),
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


class Outcome:
    """How a command ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def said(self) -> list[str]:
        """What it said to the person who started it, without the JSON log lines around it."""
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("{")]


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any] | str]:
    """The data of each event, decoded, and "[DONE]" as it is."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
