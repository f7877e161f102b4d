"""SLURM on the hosts of a lab: its controller on host 0, a node on each host, and a key of its own. No accounting.

    with Lab(2) as lab, Cluster(lab) as cluster:
        told = on_cluster(STACKS["ddp"], cluster, way="backend")

Everything lies in a temporary folder, /etc is not looked at, and the daemons end with the lab's hosts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tq.lab.net import hosts
from tq.lab.net.hosts import HostsFailed, Lab
from tq.lab.net.namespaces import end
from tq.lab.stacks.catalog import Stack
from tq.lab.stacks.run import _environment, _told

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "scontrol", "timeout")
# Processes of a job are known by their group: by their number, as is usual, they would be sought in another namespace.
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={name}({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


_RANKED = """\
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
exec "$@"
"""
_TORCHRUN = """\
exec "$0" -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID --nproc-per-node=1 \
    --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT "$@"
"""


def obstacle() -> str | None:
    """Why there can be no cluster here, in a sentence; None if there can."""
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"{', '.join(missing)} not found (apt-get install slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "SLURM's daemons are started by root"
    return hosts.obstacle()


class Cluster:
    """A context manager.

    Args:
        lab: its hosts become the nodes host0, host1, ...
        timeout_s: for the nodes to come up.

    Raises:
        HostsFailed: where they do not; the message holds the end of what the daemons said.
    """

    def __init__(self, lab: Lab, timeout_s: float = 60) -> None:
        self.lab, self._timeout_s = lab, timeout_s
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        self._kept = tempfile.TemporaryDirectory(prefix="tq-slurm-")
        self.folder = Path(self._kept.name)
        self.folder.chmod(0o755)  # where munged finds others able to write it refuses its socket
        names = [f"host{number}" for number in range(len(self.lab.hosts))]
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)
        text = _CONFIGURATION.format(name=socket.gethostname(), first=Lab.address(0), folder=self.folder)
        for number, name in enumerate(names):
            text += f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={Lab.address(number)} CPUs=1\n"
        (self.folder / "slurm.conf").write_text(text)
        try:
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
            options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
            self._daemon(0, "munged", "--foreground", "--num-threads=2", *options)
            self._wait(lambda: (self.folder / "munge.socket").exists())
            self._daemon(0, "slurmctld", "-D", "-c")
            for number, name in enumerate(names):
                self._daemon(number, "slurmd", "-D", "-N", name)
            self._wait(self._idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            end(process)
        self._started.clear()
        self._kept.cleanup()

    @property
    def _environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _daemon(self, host: int, *argv: str) -> None:
        with open(self.folder / f"{argv[0]}-{host}.log", "w") as said:
            self._started.append(self.lab.start(host, argv, self._environment, said))

    def _control(self, *argv: str) -> str:
        with tempfile.TemporaryFile("w+") as said:
            self.lab.start(0, ["scontrol", "--oneliner", *argv], self._environment, said).wait(30)
            said.seek(0)
            return said.read()

    def _idle(self) -> bool:
        return self._control("show", "nodes").count("State=IDLE ") == len(self.lab.hosts)

    def said(self) -> str:
        """The end of what each daemon said."""
        logs = {log.name: log.read_text(errors="replace")[-1500:] for log in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text}" for name, text in logs.items())

    def _wait(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not there():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._started):
                raise HostsFailed(f"SLURM's daemons did not come up\n{self.said()}")
            time.sleep(0.2)

    def srun(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
        """Runs a command on all nodes, one task each, and returns what was printed.

        Raises:
            HostsFailed: where it does not end well, or not in time.
        """
        count = len(self.lab.hosts)
        # By a signal, srun cancels its job; killed, it would leave it to the nodes.
        argv = ["srun", f"--nodes={count}", f"--ntasks={count}", "--kill-on-bad-exit=1", *argv]
        argv = ["timeout", "--kill-after=10", f"{timeout_s:g}", *argv]
        with tempfile.TemporaryFile("w+") as said:
            process = self.lab.start(0, argv, {**(env or {}), **self._environment}, said)
            try:
                code = process.wait(timeout_s + 20)
            finally:
                end(process)
            said.seek(0)
            text = said.read()
        if code:
            self._wait(self._idle)
            how = f"after {timeout_s:g} s still at work" if code in (124, 137) else f"ended with {code}"
            raise HostsFailed(f"srun: {how}\n{text[-4000:]}\n{self.said()}")
        return text


def on_cluster(
    stack: Stack, cluster: Cluster, torchrun: bool = False, timeout_s: float = 600, **task: Any
) -> list[dict[str, Any]]:
    """As ``run.on_hosts``, started by ``srun``: its tasks are the ranks, or start ``torchrun``.

    Raises:
        HostsFailed, StackFailed: where the program does not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        one = {name: "1" for name in ("OMP_NUM_THREADS", *os.environ) if name.endswith("_NUM_THREADS")}
        where = {"MASTER_ADDR": Lab.address(0), "MASTER_PORT": "29400"}
        argv = [sys.executable, "-m", stack.module]
        asked = ["sh", "-c", _TORCHRUN, *argv] if torchrun else ["sh", "-c", _RANKED, "sh", *argv]
        cluster.srun(asked, timeout_s=timeout_s, env={**one, **where, **_environment(stack, task, folder)})
        return _told(folder, len(cluster.lab.hosts))
