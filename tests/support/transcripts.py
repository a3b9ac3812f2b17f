"""The console sessions that a page shows, run again: each command in a shell, its output beside the page's.

A session is a fenced block of the language `console`. A line that begins with `$ ` is a command. It goes on after a
backslash at the end of a line, while a single quote is open, and up to the end of a here-document. The lines after it
are its output. `…` in an output stands for any text of that line; a line that is `…` alone stands for any lines. All
blocks of a page are one shell.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"<<-?\s*'?(\w+)'?")
_MARK = "\x01"
_KEPT = ("HOME", "TMPDIR", "LANG", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "LORAPLEX_MODEL_CACHE")


@dataclass(frozen=True)
class Step:
    """A command and its output, as lines without their ends."""

    command: str
    output: tuple[str, ...]
    status: int = 0


def steps_of(page: str) -> list[Step]:
    """What a page's sessions show, in order.

    Raises:
        ValueError: a block begins with output.
    """
    return [step for block in _BLOCK.findall(page) for step in _of_block(block.splitlines())]


def _of_block(lines: Sequence[str]) -> Iterator[Step]:
    at = 0
    while at < len(lines):
        if not lines[at].startswith("$ "):
            raise ValueError(f"a session begins with a command, not with {lines[at]!r}")
        command, at = [lines[at][2:]], at + 1
        here = _HERE.search(command[0])
        while command[-1] != here[1] if here else _is_open(command):
            command, at = [*command, lines[at]], at + 1
        output = []
        while at < len(lines) and not lines[at].startswith("$ "):
            output.append(lines[at])
            at += 1
        yield Step("\n".join(command), _trimmed(output))


def _is_open(command: Sequence[str]) -> bool:
    return command[-1].endswith("\\") or "".join(command).count("'") % 2 == 1


def _trimmed(lines: Sequence[str]) -> tuple[str, ...]:
    """Without spaces at the ends of lines, and without empty lines at the end."""
    return tuple("\n".join(line.rstrip() for line in lines).rstrip("\n").splitlines())


def run_steps(
    steps: Sequence[Step],
    folder: Path,
    environment: Mapping[str, str],
    here: Mapping[str, str],
    timeout: float = 280.0,
) -> list[Step]:
    """The same commands with the output that they have here, standard error included.

    Args:
        folder: the shell's working directory.
        environment: all of its environment.
        here: what stands in the page → what it is here, such as an address. Replaced in commands, and back in outputs.
        timeout: seconds for all commands together.

    Raises:
        AssertionError: they took longer, or the shell ended before the last one.
    """
    script = []
    for step in steps:
        # A group in this shell, so that variables and functions stay; its own input, so that nothing waits for a key.
        script += ["{", replaced(step.command, here), "} 2>&1 </dev/null", f"printf '{_MARK}%s{_MARK}\\n' $?"]
    process = subprocess.Popen(
        ["bash", "--noprofile", "--norc", "-c", "\n".join(script)],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=timeout)[0].decode()
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"not done in {timeout} s:\n{(late.output or b'').decode()}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a session left in the background
        process.wait()
    back = {value: name for name, value in here.items()}
    parts = re.split(rf"{_MARK}(\d+){_MARK}\n", replaced(printed, back))
    outputs, statuses = parts[:-1:2], parts[1::2]
    assert len(outputs) == len(steps), f"the shell ended after {len(outputs)} commands: {parts[-1]}"
    return [
        Step(step.command, _trimmed(output.splitlines()), int(status))
        for step, output, status in zip(steps, outputs, statuses, strict=True)
    ]


def replaced(text: str, words: Mapping[str, str]) -> str:
    if not words:
        return text
    return re.sub("|".join(re.escape(word) for word in words), lambda match: words[match[0]], text)


def fits(shown: Sequence[str], output: Sequence[str]) -> bool:
    """Whether an output is the one that a page shows."""
    pattern = ""
    for line in shown:
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*".join(re.escape(part) for part in line.split("…")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in output)) is not None


def differences(shown: Sequence[Step], found: Sequence[Step]) -> list[str]:
    """One text for each command whose output is another than the page's, or that fails without a word of it there."""
    return [
        "\n".join([f"$ {now.command}", *now.output, f"(status {now.status}; the page shows:)", *page.output])
        for page, now in zip(shown, found, strict=True)
        if not fits(page.output, now.output) or (now.status != 0 and not page.output)
    ]


def shell_environment(**more: str) -> dict[str, str]:
    """As little as a shell of a stranger has, with this environment's programs first on the path, and its caches of
    models and kernels."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "COLUMNS": "100", "PYTHONUNBUFFERED": "1", **more}
