"""Slow tests of packaging, of outside programs, of the console, of pages' sessions and of the kernels' cache, which run
when what they test has changed.

`tests/last_run.json` keeps for each subject a digest of its files as they were when its tests last passed. A run of the
whole suite leaves out the slow tests of a subject whose digest is still that one. `--everything` runs them all, and
writes the digests of those that passed; a run that names their files runs them too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KEPT = TESTS / "last_run.json"


@dataclass(frozen=True)
class Subject:
    """What is tested, and by what."""

    tests: tuple[str, ...]
    """Files and folders below `tests/`; only their slow tests are left out."""
    sources: tuple[str, ...]
    """Patterns of files below the checkout whose change runs them. The tests themselves are added."""


SUBJECTS: Mapping[str, Subject] = {
    "chart": Subject(
        ("chart", "deploy/test_alert_rules.py", "deploy/test_dashboards.py"),
        (
            "charts/**/*",
            "deploy/**/*",
            "docs/kubernetes.md",
            "docs/metrics.md",
            "docs/runbooks/*",
            "pyproject.toml",
            "server/loraplex/app/*setting*.py",
            "server/loraplex/engine/config.py",
            "tests/support/chart/*.py",
            "tests/support/deploy/alert_cases.py",
            "tools/alert_rules.py",
            "tools/chart_settings.py",
            "tools/dashboards/*.py",
        ),
    ),
    "console": Subject(
        ("e2e/console",),
        (
            "admin/loraplex/admin/**/*",
            "server/loraplex/api/**/*.py",
            "server/loraplex/control/**/*.py",
            "server/loraplex/http/**/*.py",
            "server/loraplex/lifecycle/**/*.py",
            "tests/support/console/*.py",
            "tests/support/http/*.py",
        ),
    ),
    "dashboards": Subject(
        ("e2e/dashboards",),
        (
            "charts/loraplex/dashboards/*",
            "server/loraplex/api/metrics/*.py",
            "tests/support/servers/busy_server.py",
            "tests/support/servers/prometheus.py",
            "tools/dashboards/*.py",
        ),
    ),
    "image": Subject(
        ("app/test_install_torch.py", "deploy/test_image_steps.py"),
        (
            "*ontainer*",
            ".*ignore",
            "constraints.txt",
            "kernels/loraplex/kernels/numba_runtime/*.py",
            "pyproject.toml",
            "server/loraplex/app/*.py",
            "tests/support/deploy/*.py",
            "tools/install_torch.py",
        ),
    ),
    "kernel cache": Subject(
        ("kernels/numba_runtime/test_numba_cache.py",),
        ("constraints.txt", "kernels/loraplex/kernels/numba_runtime/cache.py"),
    ),
    "pages": Subject(
        ("docs/test_moving.py", "docs/test_start_here.py", "docs/test_walk.py", "e2e/test_page_examples.py"),
        (
            "README.md",
            "admin/**/*.py",
            "constraints.txt",
            "docs/*.md",
            "docs/moving/*.md",
            "examples/**/*",
            "server/loraplex/api/**/*.py",
            "server/loraplex/app/**/*.py",
            "server/loraplex/lifecycle/**/*.py",
            "tests/support/transcripts.py",
        ),
    ),
    "ray": Subject(
        ("e2e/replicas/test_ray.py",),
        (
            "constraints.txt",
            "server/loraplex/app/cluster/*.py",
            "server/loraplex/app/engines/*.py",
            "server/loraplex/serving/**/*.py",
            "tests/support/servers/live_streams.py",
        ),
    ),
}


def digest(subject: Subject, root: Path) -> str:
    """Of the names and contents of a subject's files."""
    patterns = [*subject.sources, *(f"tests/{part}/**/*" for part in subject.tests)]
    files = {path for pattern in patterns for path in root.glob(pattern)}
    files |= {root / "tests" / part for part in subject.tests}
    found = hashlib.sha256()
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            found.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@dataclass(eq=False)
class WhenChanged:
    """Chooses for a run what it leaves out, and keeps what passed. `kept`: the file of digests, `asked`: paths that the
    command line names."""

    root: Path
    kept: Path
    everything: bool
    asked: Sequence[Path]
    subjects: Mapping[str, Subject] = field(default_factory=lambda: SUBJECTS)

    def __post_init__(self) -> None:
        self._outcomes: dict[str, set[str]] = {}

    def unchanged(self) -> frozenset[str]:
        """The subjects that are left out."""
        if self.everything:
            return frozenset()
        kept = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        return frozenset(
            name
            for name, subject in self.subjects.items()
            if not any(self._subject(path) == name for path in self.asked)
            and kept.get(name) == digest(subject, self.root)
        )

    def subject_of(self, item: pytest.Item) -> str | None:
        return self._subject(item.path) if item.get_closest_marker("slow") else None

    def _subject(self, path: Path) -> str | None:
        if not path.is_relative_to(self.root / "tests"):
            return None
        relative = path.relative_to(self.root / "tests")
        return next(
            (
                name
                for name, subject in self.subjects.items()
                if any(relative.is_relative_to(part) for part in subject.tests)
            ),
            None,
        )

    def _whole(self, name: str) -> bool:
        """Whether the command line asks for all of a subject's tests."""
        parts = [self.root / "tests" / part for part in self.subjects[name].tests]
        return all(any(part.is_relative_to(path) for path in self.asked) for part in parts)

    # What follows is called by pytest in the process that gathers the results.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self._subject(self.root / report.nodeid.partition("::")[0])
        if name is not None and (report.when == "call" or report.outcome != "passed"):
            self._outcomes.setdefault(name, set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write the digests of subjects all of whose tests ran and passed."""
        passed = [
            name for name, outcomes in self._outcomes.items() if outcomes == {"passed"} and self._whole(name)
        ]
        if not self.everything or not passed:
            return
        kept = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        kept |= {name: digest(self.subjects[name], self.root) for name in passed}
        self.kept.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run tests of image, chart, console, Ray, dashboards, pages and the kernels' cache too",
    )


def register(config: pytest.Config) -> WhenChanged:
    """Call from `pytest_configure`; give what it returns to `leave_out`."""
    parts = [arg.partition("::") for arg in config.args]
    asked = [(config.invocation_params.dir / path).resolve() for path, _, _ in parts]
    chosen = WhenChanged(TESTS.parent, KEPT, config.getoption("--everything"), asked)
    narrowed = (
        config.getoption("-k")
        or config.getoption("-m") not in ("", "not soak")
        or any(test for _, _, test in parts)
    )
    if not hasattr(config, "workerinput") and not narrowed:
        config.pluginmanager.register(chosen)
    return chosen


def leave_out(config: pytest.Config, chosen: WhenChanged, items: list[pytest.Item]) -> None:
    """Deselect the tests of subjects that have not changed."""
    unchanged = chosen.unchanged()
    left = [item for item in items if chosen.subject_of(item) in unchanged]
    if left:
        items[:] = [item for item in items if chosen.subject_of(item) not in unchanged]
        config.hook.pytest_deselected(items=left)
