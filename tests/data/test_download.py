"""Downloads that break, stall, lie or fill the disk, against a server on 127.0.0.1."""

import errno
import re
import socket
import time

import pytest
from loopback import Plan, serve

from sparkgpt.data import download as module
from sparkgpt.data.download import Patience, download
from sparkgpt.errors import UserError

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes
QUICK = Patience(timeout=5, attempts=3, pause=0.01)


@pytest.fixture
def server(monkeypatch):
    """Starts servers with the given plan and stops them at the end."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    servers = []

    def start(**behaviour):
        servers.append(serve(Plan(**{"content": CONTENT} | behaviour)))
        return servers[-1]

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def ranges(server):
    return [headers.get("Range") for _, headers in server.plan.asked]


@pytest.mark.parametrize("chunked", [False, True])
def test_in_one_go(server, tmp_path, chunked):
    one = server(chunked=chunked)
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == [None]
    assert "Authorization" not in one.plan.asked[0][1]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_broken_transfer_goes_on_where_it_broke(server, tmp_path, chunked):
    one = server(break_after=[300_000, 200_000], chunked=chunked)
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == [None, "bytes=300000-", "bytes=500000-"]


def test_an_earlier_process_left_a_part(server, tmp_path):
    one = server()
    (tmp_path / "f.part").write_bytes(CONTENT[:1000])
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == ["bytes=1000-"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_server_that_ignores_ranges_is_read_from_the_start(server, tmp_path, chunked):
    one = server(ranges=False, break_after=[300_000], chunked=chunked)
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == [None, "bytes=300000-"]


def test_a_part_that_is_complete_already(server, tmp_path):
    one = server()
    (tmp_path / "f.part").write_bytes(CONTENT)
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("behaviour", [{}, {"wrong_range": True}])
def test_a_part_that_does_not_fit_is_begun_again(server, tmp_path, behaviour):
    one = server(**behaviour)
    extra = 10 if not behaviour else -10
    (tmp_path / "f.part").write_bytes(b"x" * (len(CONTENT) + extra))
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one)[-1] is None


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, status):
    one = server(statuses=[status, status])
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT


def fails(url, tmp_path, patience=QUICK):
    """The one line that the failed download ends in."""
    with pytest.raises(UserError) as caught:
        download(url, tmp_path / "f.part", "", patience)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_giving_up_is_bounded_and_keeps_what_arrived(server, tmp_path):
    one = server(break_after=[500, 0, 0, 0, 0, 0])
    message = fails(one.url + "/f", tmp_path)
    assert "broke after 500 of 1024000 bytes; gave up after 3 attempts" in message
    assert (tmp_path / "f.part").read_bytes() == CONTENT[:500]
    assert len(one.plan.asked) == 3


@pytest.mark.parametrize(
    "status, words",
    [
        (404, "HTTP 404 Not Found; check the address and the revision"),
        (401, "HTTP 401 Unauthorized; .* HF_TOKEN"),
        (403, "HTTP 403 Forbidden; .* HF_TOKEN"),
    ],
)
def test_a_refusal_is_told_at_once(server, tmp_path, status, words):
    one = server(statuses=[status] * 9)
    message = fails(one.url + "/f", tmp_path)
    assert message.startswith(one.url + "/f: ")
    assert re.search(words, message)
    assert len(one.plan.asked) == 1


def test_timeout(server, tmp_path):
    one = server(silent_seconds=1.0)
    message = fails(one.url + "/f", tmp_path, Patience(timeout=0.1, attempts=2, pause=0.01))
    assert "no answer within 0.1 s; gave up after 2 attempts" in message


def test_nobody_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/f"
    started = time.monotonic()
    assert "Connection refused; check the address" in fails(url, tmp_path, Patience())
    assert time.monotonic() - started < 1, "another attempt would fail in the same way"


def test_disk_full_says_so_and_the_next_call_goes_on(server, tmp_path, monkeypatch):
    one = server()
    real_open = open

    class Full:
        """A file on a disk with room for 300,000 bytes."""

        def __init__(self, path, mode):
            self.file = real_open(path, mode, buffering=0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, block):
            room = 300_000 - self.file.tell()
            self.file.write(block[:room])
            if room < len(block):
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "open", Full, raising=False)
    message = fails(one.url + "/f", tmp_path)
    assert f"no space left for {tmp_path / 'f.part'}" in message
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    download(one.url + "/f", tmp_path / "f.part", "", QUICK)
    assert (tmp_path / "f.part").read_bytes() == CONTENT
    assert ranges(one) == [None, "bytes=300000-"]


def test_the_token_goes_to_the_first_host_only(server, tmp_path):
    other = server()
    first = server(redirect=other.url + "/elsewhere")
    download(first.url + "/f", tmp_path / "f.part", "secret", QUICK)
    assert first.plan.asked[0][1]["Authorization"] == "Bearer secret"
    assert "Authorization" not in other.plan.asked[0][1]
    assert (tmp_path / "f.part").read_bytes() == CONTENT


def test_the_token_follows_a_redirect_on_its_own_host(server, tmp_path):
    one = server(redirect="/moved")
    message = fails(one.url + "/f", tmp_path)  # moved for ever: urllib ends the loop
    assert "HTTP 302" in message
    one.plan.asked.clear()
    with pytest.raises(UserError):
        download(one.url + "/f", tmp_path / "f.part", "secret", QUICK)
    assert {headers.get("Authorization") for _, headers in one.plan.asked} == {"Bearer secret"}
    assert len(one.plan.asked) > 1
