"""The process that a Ray of our own belongs to: `python -m loraplex.app.cluster.head`, a folder as a line on stdin.

It starts Ray, writes the address of its head as an `Event` on stdout, and becomes `holder`, a small process that waits
for the end of stdin. So a manager may die and the next one join: Ray's processes end with their parent, and this one
has nothing of Ray's library in it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import ray

from loraplex.app.cluster.cost import OBJECT_STORE_BYTES
from loraplex.app.cluster.events import one_line, open_events
from loraplex.app.cluster.holder import hold
from loraplex.app.cluster.spec import Event


def main() -> int:
    tell = open_events()
    folder = Path(os.fsdecode(sys.stdin.buffer.readline().rstrip(b"\n")))
    # A start takes a while.
    threading.Thread(target=hold, args=(folder,), daemon=True).start()
    try:
        ray.init(
            num_cpus=1,  # Ray starts an idle worker for each
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(folder / "r"),
        )
        address = ray.get_runtime_context().gcs_address
    except Exception as error:
        tell(Event("failed", reason=one_line(error)))
        os._exit(1)
    tell(Event("started", address=address))
    # Ray's processes stay this thread's children, by whose end theirs comes; the driver of ray.init ends here.
    command = [sys.executable, "-m", "loraplex.app.cluster.holder", str(folder)]
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(main())
