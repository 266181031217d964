"""What writers that were killed left behind goes with the next one, and nobody else's work does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sparkgpt.files import replacing, replacing_directory

WRITER = """
import sys, time
from pathlib import Path
from sparkgpt import files
with getattr(files, sys.argv[1])(Path(sys.argv[2])) as temporary:
    (temporary / "part" if temporary.is_dir() else temporary).write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""
KINDS = {"replacing": replacing, "replacing_directory": replacing_directory}


def writer(kind, path):
    """A process in the middle of writing `path`."""
    command = [sys.executable, "-c", WRITER, kind, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def write(kind, path, text):
    with KINDS[kind](path) as temporary:
        (temporary / "part" if temporary.is_dir() else temporary).write_text(text)


def read(path):
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_writer_left_goes_with_the_next(kind, tmp_path):
    path = tmp_path / "a[1].out"  # the name is no pattern
    write(kind, path, "first")
    process = writer(kind, path)
    assert len(os.listdir(tmp_path)) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read(path) == "first" and len(os.listdir(tmp_path)) == 2
    write(kind, path, "second")
    assert read(path) == "second" and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_at_work_keeps_its_own(kind, tmp_path):
    path = tmp_path / "out"
    process = writer(kind, path)
    (own,) = os.listdir(tmp_path)
    try:
        write(kind, path, "ours")
        write(kind, tmp_path / "other", "something else")
        assert sorted(os.listdir(tmp_path)) == sorted([own, "other", "out"])
        assert read(tmp_path / own) == "half"
    finally:
        process.kill()
        process.wait()


def test_many_writers_of_one_file_all_end_well(tmp_path):
    code = (
        "import sys\nfrom sparkgpt.files import write_text\n"
        "for n in range(200): write_text(sys.argv[1], sys.argv[2] * 1000)"
    )
    path = tmp_path / "out"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    end = time.monotonic() + 60
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < end
        if path.exists():
            text = path.read_text()
            assert text in {name * 1000 for name in "abc"}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["out"]
