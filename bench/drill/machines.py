"""Two machines, as network name spaces of this one: a node of one Ray on each, and a bucket on the first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.drill.processes import MARK

FIRST, SECOND = "lp-drill-a", "lp-drill-b"
ADDRESS, OTHER_ADDRESS = "10.77.66.1", "10.77.66.2"
RAY = f"{ADDRESS}:6379"
BUCKET = "drill"
CABLE = "lp-drill-a0"
"""The first machine's end of the cable between them."""
_BUCKET_PORT = 9000
_S3 = f"""
from moto.server import ThreadedMotoServer
import boto3, signal
server = ThreadedMotoServer("{ADDRESS}", {_BUCKET_PORT}, verbose=False)
server.start()
boto3.client("s3", endpoint_url="http://{ADDRESS}:{_BUCKET_PORT}").create_bucket(Bucket="{BUCKET}")
print("ready", flush=True)
signal.pause()
"""
_NODE = ("--num-cpus", "1", "--object-store-memory", str(80 << 20), "--disable-usage-stats")


def run_inside(arguments: list[str], mark: str) -> int:
    """The drill with these arguments on the first machine; its exit status. Needs root."""
    with _machines(mark) as environment:
        command = [sys.executable, "-m", "bench.drill", "--inside", mark, *arguments]
        return subprocess.run(_on(FIRST, command), env=environment, check=False).returncode


@contextlib.contextmanager
def cut() -> Iterator[None]:
    """While in it, nothing passes between the machines. Called on the first one."""
    _run("ip", "link", "set", CABLE, "down")
    try:
        yield
    finally:
        _run("ip", "link", "set", CABLE, "up")


@contextlib.contextmanager
def _machines(mark: str) -> Iterator[dict[str, str]]:
    """The environment of what runs on them."""
    environment = os.environ | {
        "AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "drill", "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{ADDRESS}:{_BUCKET_PORT}",
        "AWS_ALLOW_HTTP": "true",
        "RAY_AUTH_MODE": "disabled",  # else Ray leaves a token in the home directory
    }  # fmt: skip
    of_nodes = environment | {
        MARK: mark,
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        "RAY_worker_niceness": "0",
    }
    folder = Path(tempfile.mkdtemp(prefix="lp-d-", dir="/tmp"))  # short: Ray's sockets are below it
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in (FIRST, SECOND):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
            stack.callback(_end_all, name)
        _run(
            "ip", "link", "add", CABLE, "netns", FIRST, "type", "veth", "peer", "name", "b0", "netns", SECOND
        )
        for name, cable, address in ((FIRST, CABLE, ADDRESS), (SECOND, "b0", OTHER_ADDRESS)):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                _run("ip", "-n", name, "link", "set", device, "up")
        bucket = subprocess.Popen(
            _on(FIRST, [sys.executable, "-c", _S3]),
            env=of_nodes,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert bucket.stdout is not None
        if bucket.stdout.readline() != b"ready\n":
            raise RuntimeError("the bucket did not start: is moto installed?")
        ray = str(Path(sys.executable).with_name("ray"))
        head = [ray, "start", "--head", "--node-ip-address", ADDRESS, "--port", RAY.partition(":")[2], *_NODE]
        node = [ray, "start", "--address", RAY, "--node-ip-address", OTHER_ADDRESS, *_NODE]
        _run(
            *_on(FIRST, [*head, "--include-dashboard", "false", "--temp-dir", str(folder / "r")]),
            env=of_nodes,
        )
        _run(*_on(SECOND, node), env=of_nodes)
        yield environment


def _on(machine: str, command: list[str]) -> list[str]:
    """The command on a machine, which has the name of its name space as its host name."""
    inner = ["sh", "-c", 'hostname "$0" && exec "$@"', machine, *command]
    return ["ip", "netns", "exec", machine, "unshare", "--uts", *inner]


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:8])} failed: {(done.stderr or done.stdout).strip()[-800:]}")


def _end_all(machine: str) -> None:
    """Kill what runs on a machine."""
    found = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
