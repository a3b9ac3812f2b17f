"""The process of one measurement: `python -m loraplex.engine.base_error FD`, a BaseErrorTask as JSON on its standard
input; it writes BaseErrorFigures as JSON to the pipe FD and ends.

It computes what nobody waits for, of an adapter that a tenant uploaded: at the lowest priority, in one thread, within a
limit of its memory, and first to end where the machine's runs out. It reads local files, and opens no connection.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

import msgspec
import torch

from loraplex.adapters.errors import AdapterRefused, ArtifactMissing
from loraplex.engine.base_error.comparison import NotMeasured, compare_answers, read_subject
from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.engine.execution.kv_cache import free_host_memory
from loraplex.engine.ipc.log_lines import report
from loraplex.engine.ipc.process import die_with_parent, show_as

LOWEST_PRIORITY = 19
FREE_PART = 2
"""The divisor of the free memory that gives its limit: the engine's pools fill up while they serve."""
MAX_REASON = 300


def main() -> None:
    die_with_parent()
    show_as("base-error")
    os.nice(LOWEST_PRIORITY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open(int(sys.argv[1]), "wb") as answer:
        task = msgspec.json.decode(sys.stdin.buffer.read(), type=BaseErrorTask)
        answer.write(msgspec.json.encode(measure(task)))


def measure(task: BaseErrorTask) -> BaseErrorFigures:
    """The figures, or the reason why there are none. Limits the memory of this process for good."""
    torch.set_num_threads(1)
    free = free_host_memory()
    memory = min(task.memory, task.memory if free is None else free // FREE_PART)
    try:
        subject = read_subject(task)
        # What reads the config may import transformers, which is none of the measurement's memory.
        most = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return compare_answers(subject, memory)
    except (NotMeasured, AdapterRefused, ArtifactMissing) as error:
        return _reason(error.message)
    except Exception as error:
        # torch's own allocator raises a RuntimeError.
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return _reason(f"it takes more than the {memory >> 20} MiB of memory that it may take")
        # Its message may name the server's folders, and the reason is for tenants.
        report("base_error_failed", error)
        return _reason("the measurement failed; the server's log says why")


def _reason(text: str) -> BaseErrorFigures:
    return BaseErrorFigures(reason=" ".join(text.split())[:MAX_REASON])


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
