"""A judge in a bubble: bubblewrap gives it no network, processes or shared memory but its own, and few files to read.

    grade ──bwrap──> prefork server ──fork──> judge of one attempt ──fork──> ranks, behind the kernel's walls as ever

It is a second wall for whoever judges strangers' programs (`labkit grade`), around the judge, too, which reads what
ranks say. It costs an import of torch, since nothing can be forked into it. Source: bwrap(1).
"""

from __future__ import annotations

import os
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from labkit.course.judge.prefork import PreforkServer
from labkit.launch.zygote import PINNED

KEPT_RIGHTS = ("SETUID", "SETGID", "SETPCAP", "KILL", "DAC_READ_SEARCH", "SYS_PTRACE")
"""Of root's rights, those with which a judge makes a rank nobody's, measures it and ends it."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/sys/devices/system/cpu")


class BubbledServer(PreforkServer):
    """A prefork server in a bubble of its own, which ends with this process. To be made only where `works()`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import os, sys; sys.path[:] = {sys.path!r}; from labkit.course.judge.prefork import main; "
            f"main({theirs.fileno()}, os.getpid())"
        )
        threads = [part for name, number in PINNED for part in ("--setenv", name, number)]
        command = [*_command(), *threads, sys.executable, "-c", code]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env={}
            )  # env: what bubblewrap has can be read in /proc inside
        super().__init__(ours)

    def alive(self) -> bool:
        """True while the bubble is there."""
        return not self.connection.closed and self.process.poll() is None

    def close(self) -> None:
        """End the bubble, and with it all processes in it."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def new_server() -> PreforkServer:
    """A new prefork server for strangers' programs: in a bubble where that is to be had."""
    return BubbledServer() if works() else PreforkServer()


@cache
def works() -> bool:
    """True if bubblewrap is installed and can make a bubble here, in which Python starts."""
    if shutil.which("bwrap") is None:
        return False
    try:
        done = subprocess.run(
            [*_command(), sys.executable, "-I", "-c", ""], capture_output=True, timeout=60, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _command() -> list[str]:
    shares = [f"--unshare-{name}" for name in ("net", "ipc", "pid", "uts", "cgroup-try")]
    rights = [part for right in KEPT_RIGHTS for part in ("--cap-add", f"CAP_{right}")] if os.geteuid() == 0 else []
    bound = [part for place in map(str, _places()) for part in ("--ro-bind-try", place, place)]
    options = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *bound, "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *shares, *rights, *options, "--clearenv", "--die-with-parent"]


def _places() -> list[Path]:
    """What a judge reads: the system's libraries, Python with its packages, and labkit."""
    python = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve()]
    packages = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages += [Path(place) for place in (*site.getsitepackages(), site.getusersitepackages())]
    labkit = Path(__file__).parents[2]
    return [*map(Path, SYSTEM), *dict.fromkeys([*python, *packages, labkit])]
