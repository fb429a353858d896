"""A real Slurm of its own: munge, slurmctld and several slurmd, each a node of the cluster, on this machine."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import LIMIT_S, until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
_PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_CONF = """\
ClusterName=ablate
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
MinJobAge={job_age_s}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why there can be no cluster here, None if there can be one."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PLACES) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge (docs/fleet.md)"
    return None


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path

    def run(self, *command: str) -> str:
        """Run a program of Slurm; one that fails returns nothing, because a job may have ended before."""
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment)
        return done.stdout if done.returncode == 0 else ""

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which programs find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def jobs(self, *states: str) -> list[str]:
        """Return the ids of jobs in these states, of all that are not over without any."""
        wanted = [f"--states={','.join(states)}"] if states else []
        return self.run("squeue", "--noheader", "--array", "--format=%i", *wanted).split()

    def node_of(self, job: str) -> str:
        """Return the node that runs a job."""
        return self.run("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip()


@contextmanager
def running(folder: Path, *, nodes: int, job_age_s: int = 300) -> Iterator[Cluster]:
    """Start a cluster in `folder`, whose path must be short, and end it with every process of its jobs.

    It lists a job for `job_age_s` after its end.
    """
    ports = _free_ports(nodes + 1)
    host, user = socket.gethostname(), getpass.getuser()
    lines = [
        f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 State=UNKNOWN"
        for n, port in enumerate(ports[1:])
    ]
    text = _CONF.format(host=host, user=user, folder=folder, ports=ports, job_age_s=job_age_s, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    for name in ("state", *(f"spool-n{n}" for n in range(nodes))):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    cluster = Cluster(folder)
    with ExitStack() as stack:
        stack.enter_context(_program(cluster, munge, "munged"))
        until((folder / "munge.sock").exists, what="munged")
        stack.enter_context(_program(cluster, ["slurmctld", "-D"], "slurmctld"))
        for n in range(nodes):
            stack.enter_context(_program(cluster, ["slurmd", "-D", "-N", f"n{n}"], f"n{n}"))
        until(lambda: cluster.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == str(nodes))
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--user", user)
            until(lambda: not cluster.jobs(), what="the end of the jobs", pause_s=0.5)


@contextmanager
def _program(cluster: Cluster, command: Sequence[str], name: str) -> Iterator[None]:
    path = shutil.which(command[0], path=_PLACES)
    assert path is not None
    with (cluster.folder / f"{name}.out").open("wb") as log:
        process = subprocess.Popen([path, *command[1:]], env=cluster.environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
