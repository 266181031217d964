"""One process a device, and memory left to the host, with pretended CUDA devices."""

from types import SimpleNamespace

import pytest
import torch

from sparkgpt import devices
from sparkgpt.errors import UserError

GIB = 2**30


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Two devices with memory of their own; waiting for one raises."""
    properties = lambda device: SimpleNamespace(
        uuid=f"GPU-{getattr(device, 'index', device)}", is_integrated=0
    )
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def sleep(seconds):
        raise TimeoutError

    monkeypatch.setattr(devices.time, "sleep", sleep)


def index_of(name="cuda"):
    with devices.device_for(name) as device:
        return device.index


def test_each_takes_another_and_the_third_waits(two_gpus, capsys):
    with devices.device_for("cuda") as first:
        with devices.device_for("cuda") as second:
            assert {first.index, second.index} == {0, 1}
            with pytest.raises(TimeoutError):
                index_of()
            assert capsys.readouterr().err == "waiting for a CUDA device: 2 in use\n"
        assert index_of() == second.index
    assert index_of() == 0


def test_rank_takes_its_own_and_waits_for_no_other(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with devices.device_for("cuda") as device:
        assert device.index == 1
        with pytest.raises(TimeoutError):
            index_of()
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert index_of() == 0


def test_other_users_can_lock(two_gpus):
    index_of()
    assert devices.LOCKS.stat().st_mode & 0o7777 == 0o1777
    assert {path.stat().st_mode & 0o777 for path in devices.LOCKS.iterdir()} == {0o644}


def test_cpu_needs_no_lock(two_gpus):
    assert index_of("cpu") is None and not devices.LOCKS.exists()


@pytest.fixture
def shares(monkeypatch):
    """The limits that were set: parts of a device's memory."""
    found = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append(share)
    )
    return found


@pytest.fixture
def unified(shares, monkeypatch):
    """A device that shares 128 GiB with the host; call it with the GiB that are free."""
    properties = SimpleNamespace(name="GB10", is_integrated=1, total_memory=128 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def with_free(gib):
        monkeypatch.setattr(devices, "_available_memory", lambda: int(gib * GIB))
        devices.keep_unified_floor(torch.device("cuda", 0))
        return shares

    return with_free


def test_floor_stays_free(unified):
    assert unified(104) == [0.75]  # 96 of 128 GiB


def test_start_without_room_is_refused(unified):
    with pytest.raises(UserError, match="GB10 .* 7.9 GiB are free; 8 GiB must stay free"):
        unified(7.9)


def test_memory_of_its_own_has_no_floor(two_gpus, shares, monkeypatch):
    monkeypatch.setattr(devices, "_available_memory", lambda: 0)
    devices.keep_unified_floor(torch.device("cuda", 0))
    assert shares == []


def test_available_memory_is_read_in_bytes(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:   64 kB\n")
    assert devices._available_memory(meminfo) == 65536
    meminfo.write_text("MemTotal: 100 kB\n")
    with pytest.raises(UserError, match="MemAvailable"):
        devices._available_memory(meminfo)
