"""A Ray that is none: `fake_manager.py MODE` is a manager, `fake_manager.py head` the process that holds Ray.

"ready" says that it is and waits for its end; "headless" has lost its head after that; "failing" fails with a reason;
"dying" is ready and then gone; "lost" is ready once and finds nothing after that;
"stubborn" ignores its end, and leaves a child that outlives it. All write a log line of an engine, as Ray passes it on,
and one that is none. A head fails where FAKE_HEAD is "failing".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__)))
HEAD = (*COMMAND, "head")
ADDRESS = "127.0.0.1:6379"
LINE = '{"event": "engine_ready"}'
OTHER = "INFO serve -- Application 'loraplex' is ready."


def tell(name: str, **fields: object) -> None:
    print(json.dumps({"name": name, **fields}), flush=True)


def hold() -> int:
    folder = Path(sys.stdin.readline().rstrip("\n"))
    assert folder.is_dir()
    if os.environ.get("FAKE_HEAD") == "failing":
        tell("failed", reason="no room for a head")
        return 1
    tell("started", address=ADDRESS)
    sys.stdin.read()
    return 0


def main(mode: str) -> int:
    if mode == "head":
        return hold()
    line = sys.stdin.readline()
    if not line:
        return 0
    spec = json.loads(line)
    assert spec["head"] == ADDRESS
    folder = Path(spec["folder"])
    is_first = not (folder / "managed").exists()
    (folder / "managed").touch()
    print(f"(ServeReplica:loraplex:engine pid=7) {LINE}\n{OTHER}", file=sys.stderr, flush=True)
    if mode == "failing" or (mode == "lost" and not is_first):
        tell("failed", reason="the machine is on fire")
        return 1
    tell("ready", seconds=1.5)
    if mode in ("dying", "lost"):
        return 3
    if mode == "headless" and spec["prefix"].endswith("1-"):
        tell("head_lost")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(os.environ["FAKE_CHILD"]).write_text(str(child.pid))
        sys.stdin.read()
        signal.pause()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
