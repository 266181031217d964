"""How a profile's ranks are started: the commands, and the mistakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

sys.path.append(str(ROOT / "workflow"))
from launch import Launch, launch_of  # noqa: E402


def write(path: Path, text: str) -> str:
    path.write_text(text + "\n")
    return str(path)


def threads_of(launch: Launch, threads: int) -> int:
    """What a shell makes of --threads."""
    text = launch.threads.format(threads=threads)
    return int(subprocess.check_output(["bash", "-c", f"echo {text}"]))


def test_one_process_is_called_as_ever():
    alone = Launch()
    assert alone.command == "python -m sparkgpt.train"
    assert alone.resources == {}
    assert threads_of(alone, 20) == 20
    assert Launch(nodes=1).command == alone.command  # the plugin's own srun starts it


def test_ranks_here_share_the_threads():
    launch = Launch(ranks=3)
    assert "--standalone --nproc-per-node 3 " in launch.command
    assert "--signals-to-handle SIGTERM,SIGINT,SIGUSR1" in launch.command
    assert [threads_of(launch, threads) for threads in (8, 3, 2)] == [2, 1, 1]
    assert launch.resources == {}


def test_a_job_takes_the_profile_s_threads_or_all_cores():
    assert Launch().cores(8, None) == 8
    assert [Launch(gpus=True).cores(8, gpus) for gpus in (1, 2, 16)] == [8, 4, 1]
    assert [Launch(ranks=2, gpus=True).cores(8, gpus) for gpus in (2, 4)] == [8, 4]
    assert [Launch(each=1).cores(cores, None) for cores in (1, 2, 8)] == [1, 1, 1]
    assert [Launch(2, each=3).cores(cores, None) for cores in (4, 8)] == [4, 6]
    assert Launch(4, nodes=2, each=3).cores(8, None) == 3  # SLURM's are of each rank


def test_ranks_on_nodes_are_tasks_of_one_job():
    launch = Launch(ranks=4, nodes=2, gpus=True)
    command = launch.command.format(threads=6)
    for option in ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=6"):
        assert option in command.split()
    assert threads_of(launch, 6) == 6
    assert launch.resources["nodes"] == 2 and launch.resources["tasks"] == 4
    assert launch.resources["gpu"] == 4


def test_srun_is_looked_for(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="nodes=2 .*srun, which is not on PATH"):
        launch_of({"train": {}, "ranks": 2, "nodes": 2})


def test_ranks_on_nodes_are_not_for_images():
    with pytest.raises(UserError, match="nodes=2 .*in no image"):
        launch_of({"train": {}, "ranks": 2, "nodes": 2}, contained=True)


def test_ranks_and_gpus_that_would_wait_for_each_other():
    on_cuda = {"train": {"device": "cuda"}}
    for given in (1, 3, 4):
        with pytest.raises(UserError, match=f"--resources gpu=2, .* instead of gpu={given}"):
            launch_of(on_cuda | {"ranks": 2}, gpus=given)
    for given in (2, None):
        assert launch_of(on_cuda | {"ranks": 2}, gpus=given) == Launch(ranks=2, gpus=True)
    assert launch_of(on_cuda, gpus=4) == Launch(gpus=True)
    assert launch_of({"train": {}, "ranks": 2}, gpus=4) == Launch(ranks=2)


def test_uneven_ranks():
    with pytest.raises(UserError, match="ranks=3 don't fill nodes=2"):
        launch_of({"train": {}, "ranks": 3, "nodes": 2})


def test_more_ranks_are_another_run(built, tmp_path):
    assert built.planned("--configfile", write(tmp_path / "one.yaml", "ranks: 1")) == {}
    planned = built.planned("--configfile", write(tmp_path / "two.yaml", "ranks: 2"))
    assert planned["train"] == 2 and "cache" not in planned


def test_rank_takes_its_names_from_slurm():
    said = {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "20007",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }  # fmt: skip

    def names(**more: str) -> dict[str, str]:
        output = subprocess.check_output(
            [Path(ROOT, "profiles/slurm/rank"), "env"],
            env=said | more | {"PATH": os.environ["PATH"]},
        )
        return dict(line.split("=", 1) for line in output.decode().splitlines())

    found = names()
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["1", "2", "0"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "10007")
    found = names(MASTER_ADDR="192.168.100.1", MASTER_PORT="29500")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("192.168.100.1", "29500")
