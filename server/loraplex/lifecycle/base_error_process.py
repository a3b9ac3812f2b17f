"""One measurement of `loraplex.engine.base_error`, in a process that ends with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.serving.forks.process import bare_environment
from loraplex.serving.supervision.child import Child

COMMAND = (sys.executable, "-m", "loraplex.engine.base_error")
TIME_LIMIT_S = 3600.0
"""An 8B takes about seven minutes of one core. At the lowest priority, beside an engine that uses all cores, it gets a
fraction of one."""
_KILL_WAIT_S = 5.0
_MOST_ANSWER_BYTES = 1 << 16
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


async def measure_in_process(
    task: BaseErrorTask, *, command: Sequence[str] = COMMAND, limit_s: float = TIME_LIMIT_S
) -> BaseErrorFigures:
    """The figures, or the reason why there are none: also where the process cannot be started, breaks, or takes longer
    than `limit_s` seconds. It does not outlive the call."""
    answer, to_answer = os.pipe()
    try:
        child = Child([*command, str(to_answer)], [to_answer], bare_environment() | _ENVIRONMENT)
    except OSError as error:
        os.close(answer)
        return BaseErrorFigures(reason=f"the process that measures did not start: {error.strerror}")
    finally:
        os.close(to_answer)
    try:
        child.tell(msgspec.json.encode(task))
        if not await child.wait_exit(limit_s):
            return BaseErrorFigures(reason=f"the measurement took longer than {limit_s:g} s")
        return _read(answer, child.exited.result())
    finally:
        os.close(answer)
        await child.kill(_KILL_WAIT_S)


def _read(answer: int, status: int) -> BaseErrorFigures:
    """The process has ended: what it wrote is there."""
    try:
        return msgspec.json.decode(os.read(answer, _MOST_ANSWER_BYTES), type=BaseErrorFigures)
    except msgspec.MsgspecError:
        how = f"with {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return BaseErrorFigures(reason=f"the process that measures ended {how}, without an answer")
