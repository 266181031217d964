"""Faults of a resume: momentum, the order of documents, damaged checkpoints, a full disk."""

import errno
import itertools
import os
import resource
from contextlib import contextmanager

import pytest
import torch
from helpers.models import randomised, small
from helpers.runs import flags, weights

from sparkgpt.checkpoint import load_step, save_step, valid_steps
from sparkgpt.config import TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.files import read_json
from sparkgpt.flags import parse_train
from sparkgpt.model.mup import role_of
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.train import loop
from sparkgpt.train.__main__ import main as train
from sparkgpt.train.plan import make_plan

TINY = small(model_layers=1, num_experts=4, moe_intermediate_size=32)


def updated(seed=0):
    """A model and its optimizer after three updates by random gradients."""
    model = randomised(TINY, seed)
    optimizer = HybridOptimizer(model, TrainConfig())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(1.0)
    return model, optimizer


def momenta(optimizer):
    state = optimizer.state_dict()
    return {name: value for name, value in state.items() if name.endswith("/momentum")}


def test_fault_08_momentum_comes_back_bit_for_bit_in_float32(tmp_path):
    model, optimizer = updated()
    save_step(tmp_path, 3, "run", model, optimizer, {})
    other = randomised(TINY, seed=1)
    restored = HybridOptimizer(other, TrainConfig())
    load_step(tmp_path / "step3", other, restored)
    before, after = momenta(optimizer), momenta(restored)
    matrices = {n for n, _ in model.named_parameters() if role_of(n) in ("hidden", "residual")}
    assert before.keys() == after.keys() == {f"{name}/momentum" for name in matrices}
    for name, value in after.items():
        assert value.dtype == torch.float32 and value.abs().max() > 0
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32)), name


def lose(state, name):
    del state[name]


def halve(state, name):
    state[name] = state[name].bfloat16()


def cut(state, name):
    state[name] = state[name].flatten()[:-1]


@pytest.mark.parametrize("damage", [lose, halve, cut])
@pytest.mark.parametrize("entry", ["attention.qkv.weight/momentum", "lm_head.weight/exp_avg_sq"])
def test_fault_08_a_state_that_does_not_fit_is_refused_by_name(damage, entry):
    model, optimizer = updated()
    state = optimizer.state_dict()
    (name,) = (key for key in state if key.endswith(entry))
    damage(state, name)
    with pytest.raises(UserError, match=name):
        HybridOptimizer(model, TrainConfig()).load_state_dict(state)


def documents_by_step(monkeypatch):
    """{step: ids of its documents} of every step that a trainer makes, and the steps in order."""
    made, order = {}, []

    def recorded(trainer, windows, *arguments, true=loop.Trainer.one_step):
        step = trainer.state.step
        made[step] = [window.doc_ids for window in windows]
        order.append(step)
        return true(trainer, windows, *arguments)

    monkeypatch.setattr(loop.Trainer, "one_step", recorded)
    return made, order


def test_fault_09_a_run_resumed_three_times_sees_the_documents_in_the_same_order(
    tmp_path, monkeypatch
):
    quiet = ("--no-hf-export", "--accumulate", "2", "--save-every", "3")
    made, order = documents_by_step(monkeypatch)
    assert train(flags(tmp_path, "whole-s0", *quiet)) == 0
    expected, total = dict(made), len(order)
    assert order == list(range(total)) and total >= 12
    made.clear()
    order.clear()
    arguments = flags(tmp_path, "resumed-s0", *quiet)
    for until in (3, 6, 9, total):
        assert train([*arguments, "--resume", "--max-train-steps", str(until)]) == 0
    assert made == expected and order == list(range(total))
    runs = tmp_path / "runs"
    assert weights(runs / "resumed-s0") == weights(runs / "whole-s0")


def test_fault_09_a_steps_windows_follow_from_the_step_alone(tmp_path):
    more = ("--accumulate", "2", "--target-tokens", "60000")  # more than three epochs
    model, config = parse_train(flags(tmp_path, "plan-s0", *more))
    whole = make_plan(model, config, 1)
    expected = [[w.doc_ids for w in whole.step_windows(s, 0, 1)] for s in range(whole.steps)]
    assert len({str(ids) for ids in expected}) == whole.steps
    for start in (whole.steps - 1, 7, 1, whole.steps // 2):
        again = make_plan(model, config, 1)
        for step in (start, start - 1):
            assert [w.doc_ids for w in again.step_windows(step, 0, 1)] == expected[step]


PARTS = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def truncated(content):
    return [content[:size] for size in (0, 1, len(content) // 2, len(content) - 2)]


def flipped(content):
    places = (0, len(content) // 3, len(content) - 2)
    return [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in places]


@pytest.mark.parametrize("part", PARTS)
def test_fault_10_a_truncated_or_changed_checkpoint_is_named_and_passed_over(
    tmp_path, part, capsys
):
    model, optimizer = updated()
    digests = [save_step(tmp_path, step, "run", model, optimizer, {}) for step in (10, 20)]
    assert valid_steps(tmp_path, "run") == {10: digests[0], 20: digests[1]}
    path = tmp_path / "step20" / part
    content = path.read_bytes()
    for damaged in [*truncated(content), *flipped(content)]:
        path.write_bytes(damaged)
        assert valid_steps(tmp_path, "run") == {10: digests[0]}
        said = capsys.readouterr().err
        assert f"{tmp_path / 'step20'}" in said and said.count("\n") == 1
    path.unlink()
    assert valid_steps(tmp_path, "run") == {10: digests[0]}
    path.write_bytes(content)
    (tmp_path / "step20").rename(tmp_path / ".step20.half.tmp")  # a writer that was killed
    assert valid_steps(tmp_path, "run") == {10: digests[0]}


def full_from(monkeypatch, name, call):
    """os.<name> finds the disk full from its `call`-th call on."""
    true, calls = getattr(os, name), itertools.count()

    def limited(*arguments, **named):
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(*arguments, **named)

    monkeypatch.setattr(os, name, limited)


@pytest.mark.parametrize("name, least", [("fsync", 8), ("replace", 5)])
def test_fault_10_a_disk_that_fills_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, name, least
):
    model, optimizer = updated()
    digest = save_step(tmp_path, 10, "run", model, optimizer, {})
    model, optimizer = updated(seed=1)
    for call in itertools.count():
        with monkeypatch.context() as patch:
            full_from(patch, name, call)
            try:
                save_step(tmp_path, 20, "run", model, optimizer, {})
                break
            except UserError as error:
                assert error.exit_code == 1 and "No space left on device" in str(error)
                assert "free space" in str(error)
        found = valid_steps(tmp_path, "run")
        assert found[10] == digest and {path.name for path in tmp_path.iterdir()} == {
            f"step{step}" for step in found
        }
    assert valid_steps(tmp_path, "run").keys() == {10, 20}
    assert read_json(tmp_path / "step20" / "state.json")["step"] == 20
    assert call >= least, "the disk was never full"


@contextmanager
def largest_file(size):
    """No file may grow beyond `size` bytes: writes fail, as on a full disk or over a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 4096, 40_000, 80_000])
def test_fault_10_a_write_that_fails_leaves_the_former_checkpoint(tmp_path, size):
    model, optimizer = updated()
    digest = save_step(tmp_path, 10, "run", model, optimizer, {})
    sizes = [file.stat().st_size for file in (tmp_path / "step10").iterdir()]
    assert size < max(sizes)
    with largest_file(size), pytest.raises(UserError, match="File too large.*free space") as caught:
        save_step(tmp_path, 20, "run", model, optimizer, {})
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert valid_steps(tmp_path, "run") == {10: digest}
    assert [path.name for path in tmp_path.iterdir()] == ["step10"]
