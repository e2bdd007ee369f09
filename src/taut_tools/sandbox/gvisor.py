"""A jail by gVisor: ``runsc`` runs a container for each trial, with a kernel that is a program of its own.

For machines that have runsc installed. As in other jails, the runner reads its program from standard input and reports
through a descriptor of its own. No process holds several trials, so they share no scratch folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut.errors import SandboxError
from taut.io.temporary import TemporaryFolder
from taut_tools.sandbox import launch, runner
from taut_tools.sandbox.jail import (
    ENVIRONMENT,
    GRACE,
    SHOWN,
    JailDied,
    Streams,
    as_request,
    result_of,
    wait_for,
)
from taut_tools.sandbox.limits import Limits, Ran, Trial

_NOBODY = 65534
_OWN_FAILURE = 128
"""Exit code of runsc for its own failure; greater codes are 128 + the signal that ended the program."""


@functools.cache
def runsc() -> str | None:
    """The path of runsc, or None if it is not installed."""
    return shutil.which("runsc")


class Gvisor:
    """The trials of one program, a container each."""

    def __init__(self, readable: Sequence[str], packages: Sequence[str]) -> None:
        self._readable = readable
        self._line = launch.runner(packages, launch.INSIDE, "once()")
        self._folder: TemporaryFolder | None = None
        self._count = 0

    def begin(self, limits: Limits, settings: Mapping[str, Any]) -> None:
        """Write the container's description."""
        self._folder = TemporaryFolder("sandbox")
        self._bundle = self._folder.path / "bundle"
        bound = {**{path: path for path in self._readable}, str(launch.FOLDER): str(launch.INSIDE)}
        root = self._bundle / "root"
        for path, place in bound.items():
            at = root / place.lstrip("/")
            (at if Path(path).is_dir() else at.parent).mkdir(parents=True, exist_ok=True)
            if not at.exists():
                at.touch()
        (root / runner.SCRATCH.lstrip("/")).mkdir(exist_ok=True)
        for link, target in launch.links():
            at = root / link.lstrip("/")
            if not at.exists():
                at.symlink_to(target)
        self._calls = settings["calls"]
        (self._bundle / "config.json").write_text(json.dumps(self._config(limits, bound)))

    def run(self, program: str, trial: Trial, limits: Limits, seconds: float) -> Ran:
        """Run one trial; its result, once its container is gone. Raises JailDied."""
        streams = Streams(as_request(program, trial, limits, {"calls": self._calls}), limits)
        self._count += 1
        name = f"{self._bundle.parent.name}-{self._count}"
        try:
            process = self._started(name, streams)
            self._wait_until_ready(process, streams)
            start = time.monotonic()
            ended = os.pidfd_open(process.pid)
            try:
                end = start + min(limits.wall_seconds, seconds)
                reason = streams.pass_on(ended, end)
            finally:
                os.close(ended)
                process.kill()
                code = process.wait()
                self._delete(name)
            reason = streams.rest() or reason
        finally:
            streams.close()
        took = time.monotonic() - start
        status = code - 128 if code > _OWN_FAILURE else code << 8
        return result_of(status, 0.0, streams, reason, took, trial, limits)

    def is_out_of_memory(self) -> bool:
        """False: runsc does not report it."""
        return False

    def close(self) -> None:
        """Remove the containers' descriptions; the containers have ended with their trials."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def forget(self) -> None:
        """Do nothing in a fork of this process: a jail that waits for ``begin`` holds no descriptors."""

    def _started(self, name: str, streams: Streams) -> subprocess.Popen[bytes]:
        child_in, out, err, report, begun = streams.childs_ends
        line = [*self._options(), "run", f"--bundle={self._bundle}", f"--pass-fd={report}:3"]
        line += [f"--pass-fd={begun}:4", name]
        try:
            process = subprocess.Popen(
                line,
                stdin=child_in,
                stdout=out,
                stderr=err,
                pass_fds=(report, begun),
                env={**ENVIRONMENT, "PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(
                f"runsc cannot be started: {error}; expected it to run; see taut sandbox"
            ) from error
        streams.close_childs_ends()
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes], streams: Streams) -> None:
        """Wait for the runner's word, as the start of the container does not count as the program's time."""
        if not wait_for([(streams.begun, select.POLLIN)], time.monotonic() + GRACE):
            process.kill()
            process.wait()
            raise JailDied(f"runsc was not ready in {GRACE:.0f} s")
        if os.read(streams.begun, len(runner.READY)) != runner.READY:
            process.wait()
            streams.rest()
            message = " ".join(bytes(streams.printed[1]).decode(errors="replace").split())[-SHOWN:]
            raise SandboxError(
                f"runsc failed: {message or f'exit code {process.returncode}'}; expected a container; see taut sandbox"
            )

    def _options(self) -> list[str]:
        state = self._bundle.parent / "state"
        line = [runsc() or "runsc", f"--root={state}", "--network=none", "--ignore-cgroups"]
        line += ["--overlay2=none", "--host-uds=none"]
        return line if os.getuid() == 0 else [*line, "--rootless"]

    def _delete(self, name: str) -> None:
        line = [*self._options(), "delete", "--force", name]
        with contextlib.suppress(subprocess.TimeoutExpired):  # our folder holds its state
            subprocess.run(line, capture_output=True, check=False, timeout=GRACE, cwd="/")

    def _config(self, limits: Limits, bound: Mapping[str, str]) -> dict[str, Any]:
        """The container's description in the form of the OCI runtime specification."""
        user = _NOBODY if os.getuid() == 0 else 0  # rootless: 0 inside is our own user
        scratch = [f"size={limits.scratch_mb}m", f"nr_inodes={limits.scratch_files}"]
        mounts: list[dict[str, Any]] = [
            {"destination": place, "type": "bind", "source": path, "options": ["ro", "rbind"]}
            for path, place in bound.items()
        ]
        mounts.append(
            {
                "destination": runner.SCRATCH,
                "type": "tmpfs",
                "source": "tmpfs",
                "options": [*scratch, "mode=1777", "nosuid", "nodev"],
            }
        )
        return {
            "ociVersion": "1.0.0",
            "process": {
                "terminal": False,
                "user": {"uid": user, "gid": user},
                "cwd": runner.SCRATCH,
                "args": self._line,
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": "root", "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]
            },
        }
