"""The parent of Ray's processes: `python -m loraplex.app.cluster.holder FOLDER`, what `head` becomes.

It waits for the end of stdin, which is the server's. Then, or when it is killed, all of Ray ends. It imports next to
nothing, so that little can end it before.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from loraplex.app.cluster.environment import remove_ray_folder


def hold(folder: Path) -> None:
    """Wait for the end of stdin, end what runs below the folder, and this process."""
    while os.read(0, 4096):
        pass
    remove_ray_folder(folder)
    os._exit(0)


def main() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # connections of the driver that was here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a head that dies is no zombie
    hold(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
