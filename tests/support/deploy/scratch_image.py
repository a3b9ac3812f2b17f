"""An image without a container daemon: the Containerfile's steps, run in a folder that stands in for the base image.

The folder's programs are this machine's (/usr, read-only) and its Python this interpreter's installation at /usr/local.
Packages are not installed a second time: links lead to this environment's site-packages, to those alone that the wheel
requires. pip finds them there and installs the wheel, without an index. Needs root and `unshare`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.deploy.containerfile import Config, Copy, IgnoreFile, Stage, image_chain, image_config
from support.deploy.packages import SITE, base_python, link_packages, needed_packages, remove_package
from support.markdown import ROOT

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--net", "--kill-child", "--propagation", "private")
PACKAGES_AT = "/opt/test-packages"
BUILD_TOOLS_AT = "/opt/test-tools"
DEVICES = ("null", "zero", "full", "random", "urandom")
TMPFS = "rw,nosuid,nodev,noexec,mode=1777"
"""As a container engine mounts one that is given no options."""
PASSWD = "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"


def require_namespaces() -> None:
    """Skips the test without root, and where the kernel refuses namespaces; in CI, which has root, that fails it."""
    if os.geteuid() != 0:
        pytest.skip("mounting and changing the user need root")
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        reason = "there is no unshare (util-linux)"
    if reason and os.environ.get("CI"):
        pytest.fail(f"no namespaces: {reason}")
    if reason:
        pytest.skip(f"no namespaces: {reason}")


class Root:
    """A root file system. Its own files are below `folder`; the stand-in of the base image is mounted over it by
    `mounts`, in the mount namespace of what runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("usr", "proc", "dev", "sys", "opt", "var", "etc", PACKAGES_AT[1:]):
            (folder / name).mkdir(parents=True)
        # A Python that was built with a shared library looks for it where it was installed.
        self._python = base_python()
        if not self._python.is_relative_to("/usr"):
            (folder / self._python.relative_to("/")).mkdir(parents=True)
        (folder / "tmp").mkdir(mode=0o777)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                (folder / name).symlink_to(os.readlink(Path("/", name)))
        etc = folder / "etc"
        (etc / "passwd").write_text(PASSWD)
        (etc / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        for name in ("ld.so.cache", "login.defs"):
            if Path("/etc", name).exists():
                shutil.copy(Path("/etc", name), etc / name)

    def mounts(self, *, read_only: bool = False, volumes: Mapping[str, Path] | None = None) -> str:
        """A shell script for a new mount namespace. With `read_only` nothing can be written but `volumes`, /tmp and
        /dev/shm, which begin empty."""
        root = shlex.quote(str(self.folder))
        lines = [
            "set -e",
            f"mount --bind {root} {root}",
            _bind("/usr", f"{root}/usr"),
            *self._python_mounts(root),
            _bind(str(SITE), f"{root}{PACKAGES_AT}"),
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro,nosuid,nodev,noexec sysfs {root}/sys",
            f"mount -t tmpfs -o mode=755 tmpfs {root}/dev",
            f"mkdir {root}/dev/shm",
            f"mount -t tmpfs -o {TMPFS} tmpfs {root}/dev/shm",
        ]
        for name in DEVICES:
            lines += [f"touch {root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
        if read_only:
            lines += [
                f"mount --bind {shlex.quote(str(at))} {root}{name}" for name, at in (volumes or {}).items()
            ]
            lines += [
                f"mount -t tmpfs -o {TMPFS} tmpfs {root}/tmp",
                f"mount -o remount,bind,ro {root}/dev",
                f"mount -o remount,bind,ro {root}",
            ]
        return "\n".join(lines)

    def _python_mounts(self, root: str) -> list[str]:
        if self._python == Path("/usr"):  # a distribution's, which may have no `python`
            (self.folder / "opt/test-python/bin").mkdir(parents=True, exist_ok=True)
            name = self.folder / "opt/test-python/bin/python"
            name.unlink(missing_ok=True)
            name.symlink_to(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
            return [_bind(f"{root}/opt/test-python", f"{root}/usr/local")]
        if self._python.is_relative_to("/usr"):
            return []
        return [_bind(str(self._python), f"{root}{at}") for at in ("/usr/local", self._python)]

    def run(self, command: str, environment: Mapping[str, str], workdir: str) -> None:
        """A RUN step. Fails the test with what it said."""
        (self.folder / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        inside = f"cd {shlex.quote(workdir)} && {command}"
        script = f"{self.mounts()}\nexec {_chrooted(self.folder, environment, ['/bin/sh', '-c', inside])}"
        done = subprocess.run(
            [*UNSHARE, "/bin/sh", "-c", script], capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


class ScratchImage:
    """The last stage of a Containerfile, in `folder`."""

    def __init__(self, stages: list[Stage], arguments: Mapping[str, str], folder: Path) -> None:
        self.config: Config = image_config(stages)
        self.steps: list[str] = []
        """The RUN steps that were run."""
        self._stages = {stage.name: stage for stage in stages}
        self._arguments = arguments
        self._ignore = IgnoreFile((ROOT / ".dockerignore").read_text())
        self._folder = folder
        self._roots: dict[str, Root] = {}
        self.root = self._build(image_chain(stages), "image")

    def _build(self, chain: list[Stage], name: str) -> Root:
        root = self._roots[name] = Root(self._folder / name)
        config = image_config([Stage("", "")])
        for stage in chain:
            declared: dict[str, str] = {}
            for one in stage.instructions:
                config.apply(one)
                if one.name == "ARG":
                    declared[one.value] = self._arguments[one.value]
                elif one.name == "COPY":
                    self._copy(Copy.parse(one.value), root, config.workdir)
                elif one.name == "RUN":
                    self._before(root)
                    extra = {"PIP_NO_INDEX": "1", "PYTHONPATH": BUILD_TOOLS_AT, "HOME": "/tmp"}
                    root.run(one.value, {**config.environment, **declared, **extra}, config.workdir)
                    self.steps.append(one.value)
        return root

    def _before(self, root: Root) -> None:
        """What a package index would bring: pip and the build backend for the base image's Python, and in a virtual
        environment all that the wheel requires."""
        tools = root.folder / BUILD_TOOLS_AT[1:]
        if not tools.exists():
            tools.mkdir(parents=True)
            link_packages(needed_packages("pip", "hatchling").values(), tools, PACKAGES_AT)
        for site in root.folder.glob("opt/loraplex/lib/python*/site-packages"):
            if not (site / "torch").is_symlink():
                needed = needed_packages("loraplex")
                del needed["loraplex"]
                for name in needed:
                    remove_package(site, name)
                link_packages(needed.values(), site, PACKAGES_AT)

    def _copy(self, copy: Copy, root: Root, workdir: str) -> None:
        target = root.folder / str(Path(workdir) / copy.target).lstrip("/")
        if copy.stage and copy.stage not in self._roots:
            self._build(image_chain([self._stages[copy.stage]]), copy.stage)
        base = self._roots[copy.stage].folder if copy.stage else ROOT
        for name in copy.sources:
            source = base / name.lstrip("/")
            if not copy.stage and source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=self._ignored)
            elif source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
            else:
                assert copy.stage or self._ignore.sends(name), f".dockerignore keeps {name} from the build"
                into = target / source.name if copy.target.endswith("/") else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, into)

    def _ignored(self, folder: str, names: Sequence[str]) -> set[str]:
        at = Path(folder).relative_to(ROOT)
        return {
            name
            for name in names
            if name == "__pycache__"
            or not (Path(folder, name).is_dir() or self._ignore.sends(f"{at}/{name}"))
        }


def _bind(source: str, target: str) -> str:
    """Read-only."""
    return f"mount --bind {shlex.quote(source)} {target}; mount -o remount,bind,ro {target}"


def _chrooted(folder: Path, environment: Mapping[str, str], command: Sequence[str]) -> str:
    variables = [f"{name}={value}" for name, value in environment.items()]
    return shlex.join(["chroot", str(folder), "/usr/bin/env", "-i", *variables, *command])
