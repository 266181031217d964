"""Plans that are kept: a stream goes on without planning again, and never from a wrong plan."""

import json
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgpt.data import epochs as epochs_module
from sparkgpt.data.epochs import Epochs
from sparkgpt.data.packing import plan_epoch
from sparkgpt.data.plans import PlanFiles
from sparkgpt.data.store import ByteCache, write_cache

POSITIONS = np.random.default_rng(0).integers(1, 62, 200)
PLAN = plan_epoch(POSITIONS, 128, 16, 0)
ARRAYS = ("doc_ids", "window_starts", "real_tokens")


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "c").mkdir()
    write_cache(tmp_path / "c", [bytes(n - 1) for n in POSITIONS.tolist()], {})
    return ByteCache.open(tmp_path / "c")


@pytest.fixture
def keeping(monkeypatch, corpus, tmp_path):
    """Makes the epochs of `corpus`, whose plans are kept; and a list of the epochs planned."""
    planned = []

    def watched(positions, window, buffer, seed, epoch):
        planned.append(epoch)
        return plan_epoch(positions, window, buffer, seed, epoch)

    monkeypatch.setattr(epochs_module, "KEEP_FROM", 1)
    monkeypatch.setattr(epochs_module, "plan_epoch", watched)
    return lambda key="k": Epochs(corpus, 128, 16, 0, key, tmp_path / "plans"), planned


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


def documents(epochs, index) -> list[int]:
    plan, place = epochs.locate(index)
    return plan.documents(place).tolist()


def test_a_plan_comes_back_as_it_was(tmp_path):
    files = PlanFiles(tmp_path / "plans", "key")
    assert files.load() == {}
    mapped = files.write(11, 700, PLAN)
    files.write(2, 90, PLAN)
    assert same(mapped, PLAN) and not mapped.doc_ids.flags.owndata
    found = files.load()
    assert list(found) == [2, 11]
    assert [first for first, _ in found.values()] == [90, 700]
    for _, plan in found.values():
        assert same(plan, PLAN)
        assert all(getattr(plan, n).dtype == getattr(PLAN, n).dtype for n in ARRAYS)
    assert PlanFiles(tmp_path / "plans", "other").load() == {}
    files.prune({11})
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["epoch11.plan"]


@given(st.data())
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_plan_that_is_damaged_is_passed_over(tmp_path, data):
    files = PlanFiles(tmp_path, "key")
    files.write(0, 5, PLAN)
    path = tmp_path / "epoch0.plan"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["bit", "cut", "more"]))
    if kind == "bit":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content[:place] if kind == "cut" else content + b"\0" * (kind == "more"))
    found = files.load()
    # Padding, and what follows the arrays, is no part of the plan.
    assert not found or (found[0][0] == 5 and same(found[0][1], PLAN))
    if kind == "cut" or (kind == "bit" and place >= 512):
        assert not found


def test_a_plan_of_more_documents_than_numbers_reach_is_passed_over(tmp_path):
    files = PlanFiles(tmp_path, "key")
    files.write(0, 0, PLAN)
    path = tmp_path / "epoch0.plan"
    content = path.read_bytes()
    fields = json.loads(content[:512]) | {"documents": 10**30}
    path.write_bytes(json.dumps(fields).encode().ljust(511) + b"\n" + content[512:])
    assert files.load() == {}


def test_a_plan_under_another_epochs_name_is_passed_over(tmp_path):
    files = PlanFiles(tmp_path, "key")
    files.write(0, 0, PLAN)
    (tmp_path / "epoch0.plan").rename(tmp_path / "epoch1.plan")
    assert files.load() == {}


def test_whoever_starts_again_plans_nothing(keeping):
    make, planned = keeping
    target = 5.5 * POSITIONS.sum()
    straight = make()
    windows = straight.windows_for(target)
    expected = [documents(straight, index) for index in range(windows)]
    for index in (0, 3, windows // 2, windows - 1):
        make().windows_for(target)
        one = make()
        assert one.windows_for(target) == windows
        assert documents(one, index) == expected[index]
        planned.clear()
        again = make()
        assert again.windows_for(target) == windows
        assert documents(again, index) == expected[index]
        assert planned == []


def test_a_run_that_goes_through_its_epochs_can_always_be_joined(keeping, tmp_path):
    make, planned = keeping
    target = 6 * POSITIONS.sum()
    running = make()
    windows = running.windows_for(target)
    for index in range(windows):
        expected = documents(running, index)
        if index % 25 == 0:
            before = len(planned)
            other = make()
            assert other.windows_for(target) == windows
            assert documents(other, index) == expected
            assert len(planned) == before
        assert len(list((tmp_path / "plans").iterdir())) <= 3


def test_plans_of_another_content_or_a_damaged_one_are_made_again(keeping, tmp_path):
    make, planned = keeping
    expected = [documents(make(), index) for index in range(40)]
    planned.clear()
    assert [documents(make("other"), index) for index in range(40)] == expected
    assert 0 in planned
    path = tmp_path / "plans" / "epoch0.plan"
    content = bytearray(path.read_bytes())
    content[700] ^= 4
    path.write_bytes(content)
    planned.clear()
    assert [documents(make("other"), index) for index in range(40)] == expected
    assert planned == [0]


def test_a_plan_of_damaged_lengths_is_not_taken_once_they_are_repaired(keeping, corpus, tmp_path):
    make, planned = keeping
    true = (tmp_path / "c" / "offsets.bin").read_bytes()
    offsets = np.frombuffer(true, "<i8").copy()
    offsets[100:120] -= 1  # rising still
    (tmp_path / "c" / "offsets.bin").write_bytes(offsets.tobytes())
    wrong = ByteCache.open(tmp_path / "c")
    Epochs(wrong, 128, 16, 0, "k", tmp_path / "plans").locate(0)
    (tmp_path / "c" / "offsets.bin").write_bytes(true)
    planned.clear()
    repaired = make()
    assert planned == [0]
    assert same(repaired.locate(0)[0], PLAN)


def test_small_corpora_leave_no_files(corpus, tmp_path):
    Epochs(corpus, 128, 16, 0, "k", tmp_path / "plans").windows_for(10_000)
    assert not (tmp_path / "plans").exists()


def test_threads_may_share_them(keeping):
    make, planned = keeping
    epochs, found = make(), {}
    work = lambda name: found.update({name: [documents(epochs, i) for i in range(120)]})
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [documents(make(), i) for i in range(120)]
    assert all(found[name] == expected for name in range(4))
