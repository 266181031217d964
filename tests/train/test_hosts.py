"""Two hosts for real: a network namespace each, a cable between them, no folder in common."""

import os
import shutil
import signal
import subprocess

import pytest
from helpers.processes import GONE, SABOTAGE, TRAINER, ends, started, torchrun, wait_for_step
from helpers.runs import flags, weights

from sparkgpt.checkpoint import steps_in
from sparkgpt.train.__main__ import main as train

MASTER = "10.83.0.1"
SECONDS = 5  # --ddp-timeout-seconds
LONG = ["--target-tokens", "100000", "--save-every", "10", "--log-every", "1", "--no-hf-export",
        "--keep-last", "9", "--resume", "--ddp-timeout-seconds", str(SECONDS)]  # fmt: skip


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def hosts():
    """Names of two network namespaces, joined by one cable; it has the same name at both ends."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip: install iproute2")
    names = [f"sparkgpt-{os.getpid()}-{host}" for host in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = [["name", "cable", "netns", name] for name in names]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except OSError as error:
            pytest.skip(f"needs root and a kernel with network namespaces and veth ({error})")
        for host, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.83.0.{host + 1}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def commands(hosts, arguments, program=TRAINER):
    """One launcher in each namespace, with the flags of that host."""
    for host, (name, own) in enumerate(zip(hosts, arguments, strict=True)):
        launch = (
            f"--nnodes 2 --nproc-per-node 1 --node-rank {host} --master-addr {MASTER} "
            "--master-port 29500 --signals-to-handle SIGTERM,SIGINT,SIGUSR1"
        )
        command, _ = torchrun(launch, own, program)
        yield ["ip", "netns", "exec", name, *command], {"GLOO_SOCKET_IFNAME": "cable"}


def test_two_hosts_share_nothing_but_a_cable(hosts, tmp_path):
    homes = [tmp_path / name for name in ("one", "here", "there")]
    for home in homes:
        home.mkdir()
    one, *arguments = [flags(home, "run-s0", *LONG) for home in homes]  # each with its own data
    expected, here, there = (home / "runs" / "run-s0" for home in homes)
    there = there / "rank1"
    assert train([*one, "--accumulate", "2"]) == 0

    # A signal on the other host alone: both ranks save the same step.
    slow = [*SABOTAGE, "slow", "1"]
    with started(list(commands(hosts, arguments, slow))) as agents:
        wait_for_step(here, 12, agents)
        agents[1].send_signal(signal.SIGTERM)
        said = [output for _, output in ends(agents, 60)]
    newest = steps_in(here)[0][0]
    assert newest % 10 and newest == steps_in(there)[0][0]
    assert f"stopped by another rank's signal after step {newest}" in said[0]
    assert f"stopped by SIGTERM after step {newest}" in said[1]

    # The cable is pulled: both ranks notice by themselves.
    with started(list(commands(hosts, arguments, slow))) as agents:
        wait_for_step(here, 32, agents)
        ip("-n", hosts[1], "link", "set", "cable", "down")
        said = [output for _, output in ends(agents, SECONDS + 15)]
    for rank, output in enumerate(said):
        assert f"resuming run-s0 after step {newest}" in output
        assert f"sparkgpt: error: rank {rank}: {GONE} ({SECONDS} s)" in output
    ip("-n", hosts[1], "link", "set", "cable", "up")

    with started(list(commands(hosts, arguments))) as agents:
        ended = ends(agents, 60)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "resuming run-s0 after step 30" in ended[0][1]
    last = steps_in(expected)[0][1] / "model.safetensors"
    assert weights(here) == weights(expected) == last.read_bytes()
    assert (there / last.parent.name / last.name).read_bytes() == last.read_bytes()
