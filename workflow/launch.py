"""How the ranks of a training run are started: by torchrun on this machine, or by srun on others.

Where they run changes no byte of the weights. How many they are does, so it is a value of the run.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkgpt.errors import UserError

TRAINER = "python -m sparkgpt.train"
# torchrun passes these on to its ranks, which save and stop at the same step.
TORCHRUN = (
    "python -m torch.distributed.run --standalone --nproc-per-node {ranks}"
    " --signals-to-handle SIGTERM,SIGINT,SIGUSR1 -m sparkgpt.train"
)
# No torchrun under SLURM: its signals reach every process of a step, so that a rank would get one
# from SLURM and another from torchrun, and the second ends it before it has saved.
SRUN = (
    "srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={per_node}"
    " --cpus-per-task={{threads}} --kill-on-bad-exit=1 profiles/slurm/rank " + TRAINER
)


@dataclass(frozen=True)
class Launch:
    """`ranks` processes on `nodes` nodes of a cluster, or on this machine when `nodes` is None.

    `gpus`: whether each computes on a GPU of its own. `each`: its threads, if the profile says.
    """

    ranks: int = 1
    nodes: int | None = None
    gpus: bool = False
    each: int | None = None

    @property
    def command(self) -> str:
        """The trainer's command up to its flags, as shell text of a rule."""
        if self.ranks == 1:
            return TRAINER
        if self.nodes is None:
            return TORCHRUN.format(ranks=self.ranks)
        per_node = self.ranks // self.nodes
        return SRUN.format(nodes=self.nodes, ranks=self.ranks, per_node=per_node)

    def cores(self, available: int, gpus: int | None) -> int:
        """Threads of a training job, as the profile says. Otherwise all cores, so that its speed is
        measured alone; where `--resources gpu=N` lets several run at once, its share of them."""
        if self.each is None:
            wanted = max(1, available * self.ranks // (gpus or 1))
        else:
            wanted = self.each * (self.ranks if self.nodes is None else 1)
        return min(available, wanted)

    @property
    def threads(self) -> str:
        """Shell text of the threads of each rank: SLURM counts a job's CPUs by rank already."""
        if self.ranks == 1 or self.nodes is not None:
            return "{threads}"
        return f"$(({{threads}} > {self.ranks} ? {{threads}} / {self.ranks} : 1))"

    @property
    def resources(self) -> dict[str, Any]:
        """The GPUs of a run, and what the SLURM plugin must know of a job that calls srun."""
        if self.ranks == 1 or self.nodes is None:
            return self.gpu(self.ranks)
        # tasks_per_gpu=0: the plugin would take `tasks` for it, and ask for that many on each GPU.
        step = {"mpi": "srun", "nodes": self.nodes, "tasks": self.ranks, "tasks_per_gpu": 0}
        return self.gpu(self.ranks) | step

    def gpu(self, count: int) -> dict[str, int]:
        """`count` GPUs as a resource, where the profile computes on any."""
        return {"gpu": count} if self.gpus else {}


def launch_of(
    config: Mapping[str, Any], contained: bool = False, gpus: int | None = None
) -> Launch:
    """How a checked configuration starts its runs, in an image or not. UserError when it can't be.

    `gpus` is the N of `--resources gpu=N`. Ranks under torchrun take the GPUs from 0 on: two such
    runs at once would wait for each other's.
    """
    on_gpus = config["train"].get("device") == "cuda"
    launch = Launch(config.get("ranks", 1), config.get("nodes"), on_gpus, config.get("threads"))
    if launch.nodes is None:
        if on_gpus and launch.ranks > 1 and gpus not in (None, launch.ranks):
            raise UserError(
                f"ranks={launch.ranks} take the first {launch.ranks} GPUs of this machine, a run "
                f"at a time; give --resources gpu={launch.ranks}, or leave it out, instead of "
                f"gpu={gpus}"
            )
        return launch
    if launch.ranks % launch.nodes:
        raise UserError(
            f"ranks={launch.ranks} don't fill nodes={launch.nodes} evenly; give each node as many"
        )
    if contained and launch.ranks > 1:
        raise UserError(
            f"nodes={launch.nodes} starts ranks by SLURM's srun, which is in no image; leave out "
            "nodes, or --sdm apptainer"
        )
    if not shutil.which("srun"):
        raise UserError(
            f"nodes={launch.nodes} starts ranks by SLURM's srun, which is not on PATH; run on a "
            "cluster, or leave nodes out to start them on this machine"
        )
    return launch
