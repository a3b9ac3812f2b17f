"""A manager that starts no Ray: `python fake_manager.py MODE`.

"ready" says that it is and waits for its end; "headless" has lost its head after that; "failing" fails with a reason;
"dying" is ready and then gone; "stubborn" ignores its end, and leaves a child that outlives it. All write a
log line of an engine, as Ray passes it on, and one that is none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__)))
LINE = '{"event": "engine_ready"}'
OTHER = "INFO serve -- Application 'loraplex' is ready."


def tell(name: str, **fields: object) -> None:
    print(json.dumps({"name": name, **fields}), flush=True)


def main(mode: str) -> int:
    spec = json.loads(sys.stdin.readline())
    print(f"(ServeReplica:loraplex:engine pid=7) {LINE}\n{OTHER}", file=sys.stderr, flush=True)
    if mode == "failing":
        tell("failed", reason="the machine is on fire")
        return 1
    tell("ready", seconds=1.5)
    if mode == "dying":
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
