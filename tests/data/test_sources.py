"""`fetch`: a file gets its name only when it is what was pinned."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest
from loopback import Plan, serve

from sparkgpt.data import sources
from sparkgpt.data.download import Patience
from sparkgpt.data.sources import FileSource, HttpSource, PypiSource, fetch, main
from sparkgpt.errors import UserError

CONTENT = b"one line of text\n" * 1000
PIN = hashlib.sha256(CONTENT).hexdigest()
QUICK = Patience(timeout=5, attempts=2, pause=0.01)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = serve(Plan(content=CONTENT))
    yield one
    one.shutdown()
    one.server_close()


def names(folder):
    """Files in a folder, lock files aside."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def fetched(capsys, *argv) -> dict:
    main([*map(str, argv), "--json"])
    return json.loads(capsys.readouterr().out)


def test_https_source_is_fetched_once(server, tmp_path, capsys):
    argv = (
        "https",
        "--url",
        server.url + "/a/b.jsonl?x=1",
        "--sha256",
        PIN.upper(),
        "--out",
        tmp_path,
    )
    first = fetched(capsys, *argv)
    assert first == {
        "name": "https",
        "path": str(tmp_path / "b.jsonl"),
        "bytes": len(CONTENT),
        "sha256": PIN,
        "source": server.url + "/a/b.jsonl?x=1",
        "reused": False,
    }
    assert fetched(capsys, *argv) == first | {"reused": True}
    assert fetched(capsys, *argv, "--verify") == first | {"reused": True}
    assert len(server.plan.asked) == 1
    assert names(tmp_path) == ["b.jsonl"]


def test_a_wrong_hash_is_refused_and_kept_apart(server, tmp_path):
    source = HttpSource(server.url + "/f", "f", sha256="0" * 64)
    with pytest.raises(UserError, match=f"sha256 {PIN}, pinned is 0+; kept apart as") as caught:
        fetch("https", source, tmp_path, QUICK)
    assert caught.value.exit_code == 1
    assert names(tmp_path) == ["f.rejected"]
    assert (tmp_path / "f.rejected").read_bytes() == CONTENT
    # The next call starts afresh, not from the rejected bytes.
    assert fetch("https", HttpSource(source.url, "f", PIN), tmp_path, QUICK)["sha256"] == PIN


def test_a_damaged_file_is_set_aside_and_fetched_again(server, tmp_path):
    (tmp_path / "f").write_bytes(b"damaged")
    result = fetch("https", HttpSource(server.url + "/f", "f", PIN), tmp_path, QUICK)
    assert not result["reused"]
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert (tmp_path / "f.rejected").read_bytes() == b"damaged"


def test_the_hub(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    argv = ("fineweb", "--revision", "a1b2c3", "--out", tmp_path)
    with pytest.raises(UserError, match=f"no pinned sha256.*pin them with --sha256 {PIN}"):
        main([*map(str, argv)])
    assert names(tmp_path) == ["fineweb_1b.jsonl.unpinned"]
    path, headers = server.plan.asked[0]
    assert path == "/datasets/N8Programs/lang_data/resolve/a1b2c3/fineweb_1b.jsonl"
    assert headers["Authorization"] == "Bearer secret"

    result = fetched(capsys, *argv, "--sha256", PIN)
    assert result["path"] == str(tmp_path / "fineweb_1b.jsonl")
    assert len(server.plan.asked) == 1, "what was kept apart is not fetched twice"
    assert names(tmp_path) == ["fineweb_1b.jsonl"]
    with pytest.raises(UserError, match="fineweb has no pinned sha256; give it"):
        main([*map(str, argv), "--verify"])


def test_file_source(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_bytes(CONTENT)
    argv = ("file", "--path", tmp_path / "mine.jsonl", "--sha256", PIN, "--out", tmp_path / "o")
    assert fetched(capsys, *argv)["bytes"] == len(CONTENT)
    assert names(tmp_path / "o") == ["mine.jsonl"]
    with pytest.raises(UserError, match="no such file; check --path"):
        fetch("file", FileSource(tmp_path / "missing", PIN), tmp_path / "o", QUICK)


def test_file_source_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "mine").write_bytes(CONTENT)
    monkeypatch.setattr(sources.shutil, "copyfile", full)
    with pytest.raises(UserError, match="No space left on device"):
        fetch("file", FileSource(tmp_path / "mine", PIN), tmp_path / "o", QUICK)
    assert names(tmp_path / "o") == []


def test_verify_tells_missing_and_changed_files(tmp_path):
    argv = ["file", "--path", "x/f", "--sha256", PIN, "--out", str(tmp_path), "--verify"]
    with pytest.raises(UserError, match="is missing; run `sparkgpt fetch` without --verify"):
        main(argv)
    (tmp_path / "f").write_bytes(CONTENT + b"!")
    with pytest.raises(UserError, match=f"pinned is {PIN}; remove it and fetch it again"):
        main(argv)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its index, with one small wheel of ours."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tinycorpus-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinycorpus/data.txt", "text")
        archive.writestr(
            "tinycorpus-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tinycorpus\nVersion: 1.0\nRequires-Python: <3\n",
        )
        archive.writestr(
            "tinycorpus-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tinycorpus-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def test_a_wheel_comes_through_the_users_pip_and_is_not_installed(index, tmp_path):
    pin = hashlib.sha256(index.read_bytes()).hexdigest()
    source = PypiSource("tinycorpus==1.0", index.name, pin)
    result = fetch("tiny", source, tmp_path / "o", QUICK)
    assert result["sha256"] == pin and result["source"] == "pip: tinycorpus==1.0"
    assert names(tmp_path / "o") == [index.name]
    listed = subprocess.run(
        [sys.executable, "-c", "import tinycorpus"], capture_output=True, cwd=tmp_path
    )
    assert listed.returncode != 0
    index.unlink()
    assert fetch("tiny", source, tmp_path / "o", QUICK)["reused"]


def test_what_a_killed_download_left_is_neither_used_nor_kept(index, tmp_path):
    left = tmp_path / "o" / f".pip-{index.name}"
    left.mkdir(parents=True)
    (left / index.name).write_bytes(b"half")
    pin = hashlib.sha256(index.read_bytes()).hexdigest()
    fetch("tiny", PypiSource("tinycorpus==1.0", index.name, pin), tmp_path / "o", QUICK)
    assert (tmp_path / "o" / index.name).read_bytes() == index.read_bytes() and not left.exists()


def test_a_wheel_with_another_hash_is_refused(index, tmp_path):
    with pytest.raises(UserError, match="pinned is 1+; kept apart as"):
        fetch("tiny", PypiSource("tinycorpus==1.0", index.name, "1" * 64), tmp_path / "o", QUICK)
    assert names(tmp_path / "o") == [index.name + ".rejected"]


def test_a_wheel_that_pip_cannot_find(index, tmp_path):
    source = PypiSource("tinycorpus==2.0", "tinycorpus-2.0-py3-none-any.whl", PIN)
    with pytest.raises(UserError, match="pip cannot download .*; check pip's index") as caught:
        fetch("tiny", source, tmp_path / "o", QUICK)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 1
    assert names(tmp_path / "o") == []


@pytest.mark.parametrize(
    "argv, words",
    [
        (["https"], "give --url https://HOST"),
        (["https", "--url", "ftp://host/f"], "give --url https://HOST"),
        (["https", "--url", "https://host/"], "give --url https://HOST"),
        (["https", "--url", "https://host/%2Fetc"], "give --url https://HOST"),
        (["file"], "needs --path"),
        (["fineweb"], "needs --revision COMMIT"),
        (["news", "--sha256", "abc"], "must be 64 hexadecimal digits"),
    ],
)
def test_incomplete_calls(tmp_path, argv, words):
    with pytest.raises(UserError, match=words):
        main([*argv, "--out", str(tmp_path)])


def test_out_below_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(UserError, match="cannot make the folder"):
        main(["news", "--out", str(tmp_path / "f" / "below")])


@pytest.mark.parametrize("module", ["sources", "prepare", "cache"])
def test_help_is_light(module):
    code = (
        f"import sys; from sparkgpt.data.{module} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: sys.exit(end.code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: sparkgpt " in done.stdout
