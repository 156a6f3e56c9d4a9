"""Machines of a cluster on this one, each with namespaces of its own: network, host name, processes and mounts.

A switch, which is a bridge in a network namespace, joins them. A process holds each namespace, and ends when the test's
process does; the kernel then removes the namespace and kills what runs there.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from process_state import output_of, run

_ROOT = ["--user", "--map-root-user"]  # in namespaces that belong to it, any user may do this
_MACHINE = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_PATIENCE = 20.0  # seconds that a program which sets up something may take
_SYSTEM = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}  # where its programs are
_HOLD = "echo ready; exec cat"  # until its input ends

# In a machine: its name, the addresses of all, and a root folder that has what is in the usual one, and `/shared`.
_SETUP = """
echo {name} > /proc/sys/kernel/hostname
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs root /mnt
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" /mnt/
    elif [ -d "$each" ] && [ "$each" != /mnt ]; then mkdir "/mnt$each"; mount --rbind "$each" "/mnt$each"
    fi
done
mkdir -p /mnt/shared
mount --bind {folder}/shared /mnt/shared
exec chroot /mnt sh -c '{hold}'
"""


def why_not() -> str:
    """Return why machines cannot be made here; "" if they can."""
    for name in ("ip", "unshare", "nsenter", "mount", "chroot"):
        if shutil.which(name, path=_SYSTEM["PATH"]) is None:
            return f"the program {name} is missing (Debian: apt-get install iproute2 util-linux)"
    setup = ["sh", "-ec", "ip link add switch type bridge; mount -t tmpfs root /mnt"]
    tried = run("unshare", *_ROOT, *_MACHINE, *setup, timeout=_PATIENCE, env=_SYSTEM)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name, self.address = f"node{number}", f"10.83.0.{number + 1}"
        self._cluster, self._port = cluster, f"port{number}"
        setup = _SETUP.format(name=self.name, folder=cluster.folder, hold=_HOLD)
        (child,) = psutil.Process(cluster.hold(_MACHINE, setup).pid).children()
        self._pid = child.pid
        cluster.run("ip", "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", str(self._pid))
        cluster.run("ip", "link", "set", self._port, "master", "switch", "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.address}/24", "dev", "eth0"),
                      ("link", "set", "eth0", "up")):  # fmt: skip
            self.run("ip", *words)

    def command(self, *words: str) -> list[str]:
        return [
            *self._cluster.enter, f"--target={self._pid}", "--net", "--uts", "--mount", "--pid", "--root", "--",
            "sh", "-c", 'cd "$0" && exec "$@"', f"{Path.cwd()}", *words,
        ]  # fmt: skip

    def run(self, *words: str) -> str:
        return output_of(*self.command(*words), timeout=_PATIENCE, env=_SYSTEM)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process; `options` are those of `Popen`. It is a child of the one that is returned."""
        return subprocess.Popen(self.command(*words), text=True, **options)

    def unplug(self) -> None:
        """Cut its cable: what is sent to it or by it is lost, without an error."""
        self._cluster.run("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        self._cluster.run("ip", "link", "set", self._port, "up")

    def processes(self) -> list[psutil.Process]:
        """Return what runs on it, other than the process that holds its namespaces."""
        return [each for each in psutil.process_iter() if each.pid != self._pid and self._has(each.pid)]

    def _has(self, pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{self._pid}/ns/pid").readlink()
        except OSError:  # it has ended
            return False


class Cluster:
    """Machines that reach each other by their names, `node0`, `node1`, and share all files and the folder `/shared`."""

    def __init__(self, folder: Path, machines: int) -> None:
        names = [f"10.83.0.{number + 1} node{number}\n" for number in range(machines)]
        self.folder = folder
        (folder / "shared").mkdir()
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        self._holders: list[subprocess.Popen[str]] = []
        self.enter: list[str] = []
        self.machines: list[Machine] = []
        try:
            switch = f"ip link add switch type bridge; ip link set switch up; {_HOLD}"
            pid = self.hold([*_ROOT, "--net"], switch).pid
            self.enter = ["nsenter", f"--user=/proc/{pid}/ns/user", "--preserve-credentials"]
            self._switch = f"--net=/proc/{pid}/ns/net"
            self.machines += [Machine(self, number) for number in range(machines)]
        except BaseException:
            self.close()
            raise

    def run(self, *command: str) -> str:
        return output_of(*self.enter, self._switch, *command, timeout=_PATIENCE, env=_SYSTEM)

    def hold(self, how: Sequence[str], script: str) -> subprocess.Popen[str]:
        """Make namespaces by `unshare` with the options `how`, and run the script in them, which ends with `_HOLD`.
        Return the process, or the parent of theirs."""
        enter = [*self.enter, "--"] if self.enter else []
        holder = subprocess.Popen(
            [*enter, "unshare", *how, "sh", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=_SYSTEM,
        )  # fmt: skip
        self._holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"unshare {' '.join(how)}: {holder.stderr.read()}")
        return holder

    def close(self) -> None:
        while self._holders:
            self._holders.pop().communicate(timeout=_PATIENCE)
