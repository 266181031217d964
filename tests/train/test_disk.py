"""What is on the disk after a crash, and on a disk that is full: real system calls, a real disk."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import GONE, ROOT, TRAINER, errors, is_whole, run_ranks
from helpers.runs import flags, timeless, weights
from helpers.syscalls import STRACE, Durability

from sparkgpt.checkpoint import steps_in
from sparkgpt.cli import main as cli
from sparkgpt.train.__main__ import main as train

PAGE = 4096
LONG = ["--target-tokens", "40000", "--save-every", "10", "--log-every", "1", "--resume"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(trace, run folder) of eight steps with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("traced")
    trace = folder / "trace"
    try:
        subprocess.run([*STRACE, trace, "true"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs strace: install it")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"strace may not trace here: {error.stderr.decode().strip()}")
    arguments = flags(folder, "run-s0", "--max-train-steps", "8", "--save-every", "2",
                      "--keep-last", "2", "--log-every", "1")  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*STRACE, trace, *TRAINER, *arguments], check=True, env=environment)
    return trace.read_text(), str(folder / "runs" / "run-s0")


def test_nothing_appears_before_it_is_on_the_disk(traced):
    trace, root = traced
    found = Durability(trace, root)
    steps = [name for step in (2, 4, 6, 8) for name in (f"step{step}", f"hf_step{step}")]
    final = ["model_final.safetensors", "hf", "summary.json", "run.json"]
    assert [name for name in found.appeared if "/" not in name] == ["config.json", *steps, *final]
    assert not found.faults
    assert found.known >= {f"{root}/step8/{name}" for name in ("model.safetensors", "state.json")}
    assert f"{root}/step4" not in found.known and f"{root}/step6/state.json" in found.known
    # Without its syncs the same trace is full of faults: of files, of folders, of metrics.jsonl.
    for text, fault in (
        ("step8.", "step8 appears before optimizer.safetensors of it is synced"),
        (f"<{root}>", "step4/state.json is removed before hf_step8 is durable"),
        ("metrics.jsonl", "step2 appears before metrics.jsonl is synced"),
    ):
        left = [x for x in trace.splitlines() if not (" fsync(" in x and text in x)]
        assert fault in Durability("\n".join(left), root).faults


SYNTHETIC = """\
1 openat(AT_FDCWD</>, "/run/metrics.jsonl", O_WRONLY|O_CREAT|O_APPEND, 0666) = 4</run/metrics.jsonl>
1 mkdir("/run/.step2.x.tmp", 0700) = 0
1 openat(AT_FDCWD</>, "/run/.step2.x.tmp/w", O_RDWR|O_CREAT, 0600) = 5</run/.step2.x.tmp/w>
1 write(5</run/.step2.x.tmp/w>, ""..., 9) = 9
1 write(4</run/metrics.jsonl>, ""..., 9 <unfinished ...>
2 fsync(5</run/.step2.x.tmp/w> <unfinished ...>
1 <... write resumed>) = 9
2 <... fsync resumed>) = 0
1 fsync(4</run/metrics.jsonl>) = 0
1 fsync(6</run/.step2.x.tmp>) = 0
1 rename("/run/.step2.x.tmp", "/run/step2") = 0
1 fsync(6</run>) = 0
1 unlinkat(6</run/step1>, "w", 0) = 0
1 rmdir("/run/step1") = 0
1 openat(AT_FDCWD</>, "/run/.run.json.x.tmp", O_RDWR|O_CREAT, 0600) = 5</run/.run.json.x.tmp>
1 write(5</run/.run.json.x.tmp>, ""..., 9) = 9
1 fdatasync(5</run/.run.json.x.tmp>) = 0
1 renameat(AT_FDCWD</>, "/run/.run.json.x.tmp", AT_FDCWD</>, "/run/run.json") = 0
1 fsync(6</run>) = 0
""".splitlines()

FAULTS = {  # lines taken out -> what is wrong then
    "nothing": ([], []),
    "file": ([5, 7], ["step2 appears before w of it is synced"]),
    "folder": ([9], ["step2 appears before . of it is synced"]),
    "metrics": ([8], ["step2 appears before metrics.jsonl is synced",
                      "run.json appears before metrics.jsonl is synced"]),
    "parent": ([11], ["step1/w is removed before step2 is durable",
                      "step1 is removed before step2 is durable",
                      "run.json appears before step2 is durable"]),
    "record": ([16], ["run.json appears before . of it is synced"]),
    "end": ([18], ["run.json was left without a sync of its folder"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_trace_without_one_sync_is_rejected(name):
    missing, faults = FAULTS[name]
    rest = [line for number, line in enumerate(SYNTHETIC) if number not in missing]
    found = Durability("\n".join(rest), "/run")
    assert found.faults == faults and found.appeared == ["step2", "run.json"]


def test_a_write_after_the_sync_is_rejected():
    late = [*SYNTHETIC[:8], SYNTHETIC[3], *SYNTHETIC[8:]]
    found = Durability("\n".join(late), "/run")
    assert found.faults == ["step2 appears before w of it is synced"]
    failed = [line.replace("resumed>) = 0", "resumed>) = -1 EIO") for line in SYNTHETIC]
    assert Durability("\n".join(failed), "/run").faults == found.faults  # so is a failed sync


@pytest.fixture
def disk(tmp_path):
    """An empty file system of 8 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "sparkgpt", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs root to mount a small file system ({done.stderr.strip()})")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave(disk: Path, free: int) -> Path:
    """Fill a file system up to `free` bytes; the file to remove."""
    ballast, state = disk / "ballast", os.statvfs(disk)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_bsize - free)
    return ballast


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """(folder of the data, a run of 10 steps to go on from, the uninterrupted run)."""
    folder = tmp_path_factory.mktemp("full")
    assert train(flags(folder, "whole-s0", *LONG)) == 0
    first = ["--max-train-steps", "10", "--no-save-final"]
    assert train(flags(folder, "begun-s0", *LONG, *first)) == 0
    for name in ("summary.json", "run.json"):
        (folder / "runs" / "begun-s0" / name).unlink()
    return folder, folder / "runs" / "begun-s0", folder / "runs" / "whole-s0"


def pages(*paths: Path) -> int:
    """Bytes that files, or folders of files, take in whole pages."""
    files = [file for path in paths for file in [path, *path.glob("*")] if file.is_file()]
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)


FINAL = ["--save-every", "0", "--no-hf-export"]  # then only weights and records are written
# Where the space ends -> its path in the message, flags, and how many bytes are free before, given
# the run to go on from and the whole one.
ENDS = {
    "weights": (r"\.step20\.\w+\.tmp/model\.safetensors", [],
        lambda run, whole: pages(run / "step10") // 4),
    "optimizer": (r"\.step20\.\w+\.tmp/optimizer\.safetensors", [],
        lambda run, whole: pages(run / "step10") * 3 // 4),
    "twin": (r"\.hf_step20\.\w+\.tmp/model\.safetensors", [],
        lambda run, whole: pages(run / "step10") + pages(run / "hf_step10") // 2),
    "metrics": (r"metrics\.jsonl", FINAL, lambda run, whole: PAGE),
    "final weights": (r"model_final\.safetensors", FINAL,
        lambda run, whole: growth(run, whole) + pages(run / "step10") // 4),
    "record": (r"(summary|run)\.json", FINAL,
        lambda run, whole: growth(run, whole) + pages(whole / "model_final.safetensors") + PAGE),
}  # fmt: skip


def growth(run: Path, whole: Path) -> int:
    """Bytes that metrics.jsonl has yet to take."""
    return pages(whole / "metrics.jsonl") - pages(run / "metrics.jsonl")


@pytest.mark.parametrize("where", ENDS)
def test_a_disk_that_is_full_is_one_line_and_resumes_once_freed(begun, disk, capsys, where):
    folder, begun_run, whole = begun
    file, more, free = ENDS[where]
    run = disk / "full-s0"
    shutil.copytree(begun_run, run)
    arguments = ["train", *flags(folder, "full-s0", *LONG, *more, "--out-dir", str(disk))]
    ballast = leave(disk, free(begun_run, whole))
    assert cli(arguments) == 1
    [line] = errors(capsys.readouterr().err)
    assert re.search(f"cannot write {run}/{file}: ", line)
    assert "No space left on device" in line and "free space" in line
    assert is_whole(run / "step10") and [step for step, _ in steps_in(run)][-1] == 10
    assert all(is_whole(path) for _, path in steps_in(run))
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]
    assert not (run / "run.json").exists()
    ballast.unlink()
    assert cli(arguments) == 0
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)


def test_a_full_disk_of_one_rank_ends_both_and_both_resume(begun, disk):
    """Rank 0 has saved what rank 1 could not: it must still have what both have."""
    folder, begun_run, _ = begun
    more = [*LONG, "--no-hf-export", "--keep-last", "1"]
    assert train(flags(folder, "one-s0", *more, "--accumulate", "2")) == 0
    own = flags(folder, "ranks-s0", *more)
    run, arguments = folder / "runs" / "ranks-s0", [own, [*own, "--out-dir", str(disk)]]
    ballast = leave(disk, pages(begun_run / "step10") * 3 // 2)
    (code, said), (full_code, full) = run_ranks(arguments)
    assert code == full_code == 1
    assert GONE in errors(said)[0] and "No space left on device" in errors(full)[0]
    assert [step for step, _ in steps_in(run)] == [20, 10]
    assert [step for step, _ in steps_in(disk / "ranks-s0" / "rank1")] == [10]
    ballast.unlink()
    (code, said), (other, _) = run_ranks(arguments)
    assert code == other == 0 and "resuming ranks-s0 after step 10" in said
    assert weights(run) == weights(folder / "runs" / "one-s0")
    assert len(steps_in(run)) == len(steps_in(disk / "ranks-s0" / "rank1")) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root runs the tests of full disks themselves")
def test_full_disks_without_root(tmp_path):
    """The tests above, in a name space where this user may mount."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode:
        pytest.skip("needs root, or unshare (util-linux) and user namespaces")
    here = ["--basetemp", str(tmp_path / "inside"), "-p", "no:cacheprovider"]
    tests = [sys.executable, "-m", "pytest", *here, "-k", "is_full or full_disk_of", __file__]
    subprocess.run([*inside, *tests], check=True, cwd=ROOT)
