"""`loraplex` that ends itself by SIGKILL at a step: `python dying_serve.py STEP ARMED serve …`.

It dies at the first such step that it announces while the file ARMED is there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from loraplex.adapters.store import open_store
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.app.cli import main

if __name__ == "__main__":
    doomed, armed = FaultPoint(sys.argv[1]), Path(sys.argv[2])

    def fault(step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if step is doomed and armed.exists():
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    open_store.ArtifactStore = lambda folder, _: ArtifactStore(folder, fault)  # type: ignore[assignment,misc]
    del sys.argv[1:3]
    main()
