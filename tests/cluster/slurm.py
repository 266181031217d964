"""A SLURM cluster of two nodes on this machine, for as long as a test needs it.

It is started by $RIG/start-slurm where RIG names a folder that has it, else here, from the daemons
on PATH and as the user who asks, with keys, ports and files of its own. No accounting database.
Run as a program, it says in one line what is missing, if anything is.
"""

import getpass
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("node1", "node2")
CPUS, MEMORY, GPUS = 1, 3000, 1  # of each node; MiB; a GPU is a name here, with nothing behind it
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # not on every user's PATH

# cred_expire is also how long a requeued job waits. MinJobAge keeps ended jobs for squeue to show.
CONFIG = """\
ClusterName=sparkgpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=600
GresTypes=gpu
NodeName=node1 Port={ports[1]} NodeHostname={host} NodeAddr=127.0.0.1 {size}
NodeName=node2 Port={ports[2]} NodeHostname={host} NodeAddr=127.0.0.1 {size}
PartitionName=main Nodes=node[1-2] Default=YES State=UP
"""


def missing() -> str | None:
    """What keeps a cluster from being started here, and what to do; None when nothing does."""
    if os.environ.get("RIG"):
        script = Path(os.environ["RIG"], "start-slurm")
        return None if script.is_file() else f"RIG is set, but there is no {script}; unset it"
    absent = [name for name in (*DAEMONS, *CLIENTS) if not shutil.which(name, path=SBIN)]
    if absent:
        return (
            f"no {', '.join(absent)} on PATH; install SLURM and MUNGE (Debian: apt-get install "
            "munge slurmctld slurmd slurm-client)"
        )
    return None


class Cluster:
    """A running cluster; its clients come first on the PATH of `environment`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def __call__(self, *command: str) -> str:
        """What a client says. CalledProcessError when it fails."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=30
        )
        if result.returncode:
            raise subprocess.CalledProcessError(
                result.returncode, command, result.stdout, result.stderr
            )
        return result.stdout

    def log(self) -> str:
        """What the daemons wrote."""
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs)

    def is_up(self) -> bool:
        """Whether all nodes answer."""
        try:
            states = self("sinfo", "--noheader", "--Node", "--format=%T").split()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return len(states) == len(NODES) and {"idle", "mixed", "allocated"}.issuperset(states)


@contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """A cluster with all its files in `folder`, which sockets want short; gone afterwards."""
    cluster = Cluster(folder)
    with _by_rig(folder) if os.environ.get("RIG") else _by_hand(folder):
        deadline = time.monotonic() + 30
        while not cluster.is_up():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not come up\n{cluster.log()}")
            time.sleep(0.2)
        try:
            yield cluster
        finally:
            cluster("scancel", f"--user={getpass.getuser()}", "--full")
            deadline = time.monotonic() + 15
            while cluster("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)


@contextmanager
def _by_rig(folder: Path) -> Iterator[None]:
    sizes = {"NODE_CPUS": CPUS, "NODE_MEM": MEMORY, "NODE_GPUS": GPUS}
    environment = os.environ | {name: str(size) for name, size in sizes.items()}
    command = [Path(os.environ["RIG"], "start-slurm"), folder]
    subprocess.run(command, env=environment, check=True, timeout=300)
    try:
        yield
    finally:
        subprocess.run([folder / "stop"], check=True, timeout=120)


@contextmanager
def _by_hand(folder: Path) -> Iterator[None]:
    _write_files(folder)
    daemons = []

    def start(name: str, *command: str) -> None:
        with open(folder / "log" / name, "a") as log:
            command = [shutil.which(command[0], path=SBIN), *command[1:]]
            daemons.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            )

    try:
        start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
              f"--key-file={folder}/munge.key", f"--seed-file={folder}/munge.seed",
              f"--pid-file={folder}/munged.pid", f"--log-file={folder}/log/munge")  # fmt: skip
        while not (folder / "munge.socket").exists():
            if daemons[0].poll() is not None:
                raise RuntimeError("munged ended\n" + (folder / "log" / "munged").read_text())
            time.sleep(0.05)
        start("slurmctld", "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf")
        yield
    finally:
        for daemon in reversed(daemons):  # munged last: the others talk through it
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _write_files(folder: Path) -> None:
    folder.chmod(0o755)  # munged wants its socket within everyone's reach
    for name in ("bin", "log", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(key, os.urandom(1024))
    os.close(key)
    size = f"CPUs={CPUS} RealMemory={MEMORY} Gres=gpu:{GPUS}"
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=platform.node().split(".")[0],
            ports=_free_ports(1 + len(NODES)),
            user=getpass.getuser(),
            folder=folder,
            size=size,
        )
    )
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
    # By scripts, not by SLURM_CONF: the plugin's job step drops variables of that kind.
    for name in CLIENTS:
        script = folder / "bin" / name
        real = shutil.which(name, path=SBIN)
        script.write_text(f"#!/bin/sh\nSLURM_CONF='{folder}/slurm.conf' exec {real} \"$@\"\n")
        script.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    if reason := missing():
        print(f"sparkgpt: error: {reason}", file=sys.stderr)
        sys.exit(2)
