"""Several ranks are one run: as exact as one process, and stopped, refused and resumed together."""

import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import (
    GONE,
    ROOT,
    SABOTAGE,
    ends,
    errors,
    is_whole,
    last_step,
    rank_commands,
    run_ranks,
    started,
    torchrun,
    wait_for_step,
)
from helpers.runs import MOE, flags, timeless, weights, write_documents
from safetensors.torch import load_file

from sparkgpt.checkpoint import steps_in
from sparkgpt.data.cache import open_documents
from sparkgpt.data.stream import WindowStream
from sparkgpt.files import read_json
from sparkgpt.train.__main__ import main as train

KINDS = {"dense": [], "moe": MOE}
LONG = ["--target-tokens", "100000", "--save-every", "10", "--log-every", "1", "--no-hf-export",
        "--resume"]  # fmt: skip
SECONDS = 5  # --ddp-timeout-seconds, where a rank has to give up


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, an uninterrupted run there): one process, two windows to a step, about 50 steps."""
    folder = tmp_path_factory.mktemp("ranks")
    assert train(flags(folder, "whole-s0", *LONG, "--accumulate", "2")) == 0
    return folder, folder / "runs" / "whole-s0"


def check_equal(run: Path, expected: Path) -> None:
    """Two ranks leave what one process left: the weights' bytes, each line once, its losses.

    Losses are sums over windows in another order, in float64.
    """
    assert weights(run) == weights(expected)
    for ours, theirs in zip(timeless(run), timeless(expected), strict=True):
        assert (ours["kind"], ours["step"]) == (theirs["kind"], theirs["step"])
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() & {"train/loss", "val/loss", "real_tokens", "lr/factor"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12)


@pytest.mark.parametrize("kind, world, tokens", [("dense", 2, 11000), ("moe", 2, 11000),
                                                 ("moe", 3, 9500)])  # fmt: skip
def test_ranks_equal_one_process_that_accumulates(tmp_path, kind, world, tokens):
    more = [*KINDS[kind], "--no-hf-export", "--target-tokens", str(tokens)]
    assert train(flags(tmp_path, "one-s0", *more, "--accumulate", str(world))) == 0
    stream = WindowStream(
        open_documents(tmp_path / "train.jsonl"), window=1024, buffer=1024, seed=0
    )
    assert stream.windows_for(tokens) % world == 1  # only rank 0 has real tokens in the last step
    arguments = flags(tmp_path, "ranks-s0", *more)
    ended = run_ranks([arguments] * world)
    assert [code for code, _ in ended] == [0] * world, ended
    one, ranks = tmp_path / "runs" / "one-s0", tmp_path / "runs" / "ranks-s0"
    assert read_json(ranks / "summary.json")["world_size"] == world
    if world == 2:
        check_equal(ranks, one)
        return
    # (a + b) + c or a + (b + c): three gradients are added in another order than in one process.
    # Measured: 6e-8, the last bit of a weight near 1.
    ours, theirs = (load_file(run / "model_final.safetensors") for run in (ranks, one))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-6


def other_documents(folder: Path) -> list[str]:
    return ["--train-path", str(write_documents(folder / "other.jsonl", 200, 7))]


DISAGREEMENTS = {
    "data": (other_documents, r"\btrain_digest \W*\w+ \W*[0-9a-f]{64}\W+\w+ \W*[0-9a-f]{64}"),
    "seed": (lambda folder: ["--seed", "1"], r"\bseed \D*0\D*1;"),
    "steps": (lambda folder: ["--max-train-steps", "5"], r"\bsteps \D*12\D*5;"),
    "rhythm": (lambda folder: ["--save-every", "7", "--resume"], "resume .*save_every"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_name_rank_and_value(tmp_path, what):
    more, value = DISAGREEMENTS[what]
    own = flags(tmp_path, "run-s0", "--ddp-timeout-seconds", "20")
    check_refused(run_ranks([own, [*own, *more(tmp_path)]]), value)
    assert not steps_in(tmp_path / "runs" / "run-s0")


def test_ranks_with_other_code_name_rank_and_value(tmp_path):
    shutil.copytree(ROOT / "sparkgpt", tmp_path / "sparkgpt")
    module = tmp_path / "sparkgpt" / "train" / "step.py"
    module.write_bytes(module.read_bytes().replace(b"One", b"one", 1))
    own = flags(tmp_path, "run-s0", "--ddp-timeout-seconds", "20")
    other = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
        "from sparkgpt.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    )
    check_refused(run_ranks([own, own], rank1=[sys.executable, "-c", other]), r"\bcode ")


def check_refused(ended: list[tuple[int, str]], value: str) -> None:
    for code, output in ended:
        [line] = errors(output)
        assert code == 2 and "rank 1 differs from rank 0" in line and re.search(value, line)


def resume_and_compare(arguments: list[str], run: Path, expected: Path) -> str:
    """Start both ranks again; what rank 0 says, once the weights are the expected ones."""
    (code, said), (other, _) = run_ranks([arguments, arguments])
    assert code == other == 0, said
    check_equal(run, expected)
    return said


@pytest.mark.parametrize("dead, step", [(1, 25), (0, 20)])
def test_a_killed_rank_ends_the_other_at_once_and_all_resume(whole, dead, step):
    folder, expected = whole
    name = f"killed{dead}-s0"
    run = folder / "runs" / name
    arguments = flags(folder, name, *LONG)
    bomb = {f"rank{dead}": [*SABOTAGE, "kill", str(step)]}
    with started(rank_commands([arguments, arguments], **bomb)) as processes:
        assert processes[dead].wait(60) == -signal.SIGKILL
        since = time.monotonic()
        (code, output) = ends([processes[1 - dead]], 60)[0]
    assert time.monotonic() - since < 10  # not the 300 s of --ddp-timeout-seconds
    assert code == 1 and GONE in " ".join(errors(output)) and len(errors(output)) == 1
    said = resume_and_compare(arguments, run, expected)
    assert f"resuming {name} after step {(step - 1) // 10 * 10}" in said


def test_a_stopped_rank_ends_the_other_in_time_and_all_resume(whole):
    folder, expected = whole
    run = folder / "runs" / "stopped-s0"
    arguments = flags(folder, "stopped-s0", *LONG, "--ddp-timeout-seconds", str(SECONDS))
    stopped = [*SABOTAGE, "stop", "25"]
    with started(rank_commands([arguments, arguments], rank1=stopped)) as processes:
        wait_for_step(run, 24, processes)
        since = time.monotonic()
        (code, output) = ends(processes[:1], 60)[0]
        waited = time.monotonic() - since
        assert processes[1].poll() is None  # stopped still, and holding its lock
        processes[1].kill()
    assert code == 1 and f"({SECONDS} s)" in errors(output)[0] and GONE in errors(output)[0]
    assert SECONDS - 1 < waited < SECONDS + 5
    resume_and_compare(arguments, run, expected)


def test_the_newest_checkpoint_valid_on_all_ranks_is_taken(whole):
    """step40 is damaged on rank 1, step30 is other weights there, step20 is missing on rank 0."""
    folder, expected = whole
    run = folder / "runs" / "damaged-s0"
    arguments = flags(folder, "damaged-s0", *LONG, "--keep-last", "4")
    first = [*arguments, "--max-train-steps", "40"]
    assert [code for code, _ in run_ranks([first, first])] == [0, 0]
    (run / "run.json").unlink()
    damaged = run / "rank1" / "step40" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    shutil.rmtree(run / "rank1" / "step30")
    shutil.copytree(run / "rank1" / "step20", run / "rank1" / "step30")
    assert is_whole(run / "rank1" / "step30")  # only a comparison of ranks can tell
    shutil.rmtree(run / "step20")
    (code, said), (other_code, other) = run_ranks([arguments, arguments])
    assert code == other_code == 0, said
    assert "resuming damaged-s0 after step 10" in said
    assert f"{damaged.parent}: damaged" in other
    check_equal(run, expected)


@pytest.mark.parametrize("what, step", [("weights", 13), ("momentum", 20)])
def test_ranks_that_drift_apart_stop_at_the_next_save(tmp_path, what, step):
    arguments = flags(tmp_path, "run-s0", *LONG)
    for code, output in run_ranks([arguments, arguments], rank1=[*SABOTAGE, what, str(step)]):
        [line] = errors(output)
        assert code == 1 and "ranks 0 and 1 hold different" in line and "after step 20" in line
    assert [step for step, _ in steps_in(tmp_path / "runs" / "run-s0")] == [20, 10]


def test_signals_to_the_launcher_reach_every_rank(whole):
    folder, expected = whole
    run = folder / "runs" / "asked-s0"
    arguments = flags(folder, "asked-s0", *LONG)
    launch = "--standalone --nproc-per-node 2 --signals-to-handle SIGTERM,SIGINT,SIGUSR1"
    before = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        with started([torchrun(launch, arguments, [*SABOTAGE, "slow", "1"])]) as [agent]:
            wait_for_step(run, before + 3, [agent])
            agent.send_signal(number)
            [(_, output)] = ends([agent], 60)
        stopped = re.findall(rf"stopped by {number.name} after step (\d+);", output)
        assert len(stopped) == 2 and len(set(stopped)) == 1, output
        before = int(stopped[0])
        assert before == last_step(run)
        for own in (run, run / "rank1"):
            assert steps_in(own)[0][0] == before and is_whole(own / f"step{before}")
    for said in (f"resuming asked-s0 after step {before}", "already complete"):
        assert said in resume_and_compare(arguments, run, expected)
