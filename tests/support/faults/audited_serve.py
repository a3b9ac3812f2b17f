"""`loraplex` with every change of the file system noted: `python audited_serve.py LOG STORE serve …`.

One line of JSON a change that the interpreter makes, as [event, path, whether it is below STORE].
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_PATHS = {
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.mkfifo": 1,
    "os.mknod": 1,
    "subprocess.Popen": 0,
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def watch(log_path: str, store: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    inside = os.path.realpath(store) + os.sep

    def note(event: str, path: Any) -> None:
        text = os.fsdecode(path) if not isinstance(path, int) else f"fd {path}"
        below = isinstance(path, int) or (os.path.realpath(text) + os.sep).startswith(inside)
        os.write(log, json.dumps([event, text, below]).encode() + b"\n")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and isinstance(flags, int) and flags & _WRITES:
                note(event, path)
        elif event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                note(event, path)

    sys.addaudithook(hook)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2])
    from loraplex.app.cli import main

    del sys.argv[1:3]
    main()
