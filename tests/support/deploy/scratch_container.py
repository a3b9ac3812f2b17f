"""A process in a `ScratchImage`, started as a container engine starts it.

It has the image's user and no capabilities, is process 1 of its own process namespace, and has a network of its own. Of
its file systems only the declared volumes, /tmp and /dev/shm can be written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.deploy.scratch_image import UNSHARE, ScratchImage

LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
"""


class ScratchContainer:
    """The image's entry point and command. A context manager that starts it, and leaves nothing behind."""

    def __init__(self, image: ScratchImage, folder: Path, environment: Mapping[str, str]) -> None:
        self.image = image
        self.environment = {**image.config.environment, **environment}
        self.volumes = {name: folder / name.strip("/").replace("/", "-") for name in image.config.volumes}
        for name, at in self.volumes.items():
            # A new volume takes the owner and the mode of the image's folder.
            own = (image.root.folder / name.lstrip("/")).stat()
            at.mkdir(parents=True)
            os.chown(at, own.st_uid, own.st_gid)
            at.chmod(own.st_mode & 0o7777)
        self.log_path = folder / "log"
        self._unshare: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ScratchContainer:
        mounts = self.image.root.mounts(read_only=True, volumes=self.volumes)
        up = shlex.join([sys.executable, "-c", LOOPBACK_UP])
        start = shlex.join(self._as_user(self.image.config.entrypoint + self.image.config.command))
        script = f"{mounts}\n{up}\nexec chroot {shlex.quote(str(self.image.root.folder))} {start}"
        with open(self.log_path, "wb") as log:
            self._unshare = subprocess.Popen([*UNSHARE, "/bin/sh", "-c", script], stdout=log, stderr=log)
        try:
            self.wait(lambda: bool(self._children()), 30)  # unshare makes its namespaces before it forks
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._unshare is not None
        # Not by unshare's --kill-child: Linux forgets that signal where a process changes its user. With process 1 of
        # the namespace all others there end.
        if self._unshare.poll() is None:
            for pid in self._children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._unshare.kill()
        self._unshare.wait(30)

    @property
    def pid(self) -> int:
        """Of its process 1, as this machine numbers it."""
        found = self._children()
        assert found, f"it ended:\n{self.log()}"
        return found[0]

    def execute(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec` does: beside the server, as its user."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--root"]
        return subprocess.run(
            [*enter, *self._as_user(command, environment)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def is_healthy(self) -> bool:
        """What the image's own health check says."""
        return self.execute(*self.image.config.health).returncode == 0

    def wait(self, condition: Callable[[], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self._unshare is not None
            assert self._unshare.poll() is None, f"it ended with {self._unshare.returncode}:\n{self.log()}"
            assert time.monotonic() < end, f"not within {timeout} s:\n{self.log()}"
            time.sleep(0.5)

    def stop(self, timeout: float) -> int:
        """The image's stop signal; the exit code. Fails where that takes longer than `timeout`."""
        assert self._unshare is not None
        os.kill(self.pid, signal.Signals[self.image.config.stop_signal])
        try:
            return self._unshare.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout} s:\n{self.log()}") from None

    def writable(self) -> set[str]:
        """Mount points of the container that are not mounted read-only."""
        found = set()
        for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines():
            fields = line.split()
            if "rw" in fields[5].split(","):
                found.add(fields[4])
        return found

    def _children(self) -> list[int]:
        assert self._unshare is not None
        listed = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text()
        return [int(child) for child in listed.split()]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def _as_user(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        user, _, group = self.image.config.user.partition(":")
        rights = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        variables = [f"{name}={value}" for name, value in {**self.environment, **(environment or {})}.items()]
        env = shutil.which("env") or "/usr/bin/env"
        here = f"--chdir={self.image.config.workdir}"
        return [
            "setpriv",
            f"--reuid={user}",
            f"--regid={group}",
            *rights,
            env,
            "-i",
            here,
            *variables,
            *command,
        ]
