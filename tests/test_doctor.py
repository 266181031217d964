"""The doctor: its judgement on machines laid out by hand, its formulas, and real runs."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.models import randomised, small

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.data.stream import make_window
from sparkgpt.doctor import describe, device, diagnosis, libraries, scaling
from sparkgpt.doctor.ceiling import SPECIFICATIONS, ceiling, mfu
from sparkgpt.doctor.device import Device, Rates, fits_build, read_device
from sparkgpt.doctor.findings import NO, OK, WARN, Finding, size
from sparkgpt.doctor.host import Host, Interface, cpu_quota, interfaces, memory, memory_limit
from sparkgpt.doctor.libraries import Container, Pins, Software, compare_pins, try_apptainer
from sparkgpt.doctor.needs import memory_need, saved_elements
from sparkgpt.doctor.profiles import judge, preferred, read_profiles
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT
from sparkgpt.model.cost import hidden_parameters, parameter_counts
from sparkgpt.model.mup import init_weights
from sparkgpt.model.transformer import Transformer
from sparkgpt.ops.choices import kernels_of
from sparkgpt.optim.groups import parameter_groups
from sparkgpt.train.step import window_loss

GIB = 2**30
SHAPE_06B = ModelConfig(
    model_layers=28, model_dim=1024, attention_heads=16, kv_heads=8, intermediate_size=3072
)
HOST = Host(
    "Linux", "x86_64", "a CPU", "one", 8, 8, 32 * GIB, 30 * GIB, None, "/x", 500 * GIB, (), ()
)
CPU = Device("cpu", "2.13.0+cpu", 8, {"sdpa-expanded": ""}, "sdpa-expanded")
GB10 = Device(
    "cuda", "2.13.0+cu130", 8, {"varlen": ""}, "varlen", "580.95", "13.0", ("sm_90", "sm_120"),
    "NVIDIA GB10", 1, (12, 1), 120 * GIB, 3 * GIB, True, 48,
)  # fmt: skip
SOFTWARE = Software(
    "3.12.1", "python", {tool.name: "1.0" for tool in libraries.TOOLS}, Pins(True, 97),
    Container(None, None, None, None, "not installed"),
)  # fmt: skip
RATES = Rates(98e12, 90e12, 220e9, 210e9, "by hand")
PROFILES = {wanted.name: wanted for wanted in read_profiles()}


def written(root, **files):
    """Files of a machine; __ in a name stands for /, _ stays."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def facts(host=HOST, software=SOFTWARE, device=CPU, rates=RATES):
    return diagnosis.Facts(host, software, device, rates)


def levels(findings, what):
    return [finding.level for finding in findings if finding.what == what]


# The machine's own files.


def test_available_memory_counts_the_page_cache(tmp_path):
    text = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n"
    assert memory(written(tmp_path, proc__meminfo=text)) == (1_024_000, 819_200)


def test_tightest_cgroup_of_version_2(tmp_path):
    root = written(
        tmp_path,
        proc__self__cgroup="0::/pod/box\n",
        sys__fs__cgroup__pod__memoryDOTmax="4000\n",
        sys__fs__cgroup__pod__memoryDOTcurrent="3500\n",
        sys__fs__cgroup__pod__memoryDOTstat="anon 1000\ninactive_file 500\n",
        sys__fs__cgroup__pod__box__memoryDOTmax="max\n",
        sys__fs__cgroup__pod__box__memoryDOTcurrent="10\n",
        sys__fs__cgroup__pod__box__cpuDOTmax="150000 100000\n",
        sys__fs__cgroup__pod__cpuDOTmax="max 100000\n",
    )
    assert memory_limit(root) == (4000, 1000)
    assert cpu_quota(root) == 1.5


def test_cgroup_of_version_1_and_none(tmp_path):
    root = written(
        tmp_path,
        proc__self__cgroup="4:memory:/job\n1:cpu,cpuacct:/\n0::/\n",
        sys__fs__cgroup__memory__job__memoryDOTlimit_in_bytes="4000",
        sys__fs__cgroup__memory__job__memoryDOTusage_in_bytes="1000",
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes="9223372036854771712",
        sys__fs__cgroup__memory__memoryDOTusage_in_bytes="5000",
        sys__fs__cgroup__cpu__cpuDOTcfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpuDOTcfs_period_us="100000\n",
    )
    assert memory_limit(root) == (4000, 3000)
    assert cpu_quota(root) is None
    assert memory_limit(tmp_path / "nothing") == (None, None)


def test_interfaces_that_are_up(tmp_path):
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "down"), ("docker0", "up")):
        parts = {"operstate": state, "mtu": "9000", "speed": "200000"}
        for part, text in parts.items():
            written(tmp_path, **{f"sys__class__net__{name}__{part}": f"{text}\n"})
    assert interfaces(tmp_path) == (Interface("eth0", 9000, 200_000),)


# The software.


def test_pins_name_what_differs_and_what_is_missing(tmp_path):
    numpy = libraries.package_version("numpy")
    (tmp_path / "base.lock.txt").write_text(
        f"numpy=={numpy} ; python_full_version >= '3.0' \\\n    --hash=sha256:0\n"
        "rich==0.0.1 \\\nno-such-thing==1.0\nnumpy==0.1 ; python_full_version < '3.0'\n"
    )
    public = torch.__version__.split("+")[0]
    (tmp_path / "torch.txt").write_text(f"torch=={public}\n")  # +cpu counts as the same
    pins = compare_pins(tmp_path)
    assert pins.count == 4 and pins.missing == ("no-such-thing",)
    assert [text.split()[0] for text in pins.differing] == ["rich"]
    assert not compare_pins(tmp_path / "nothing").found


@pytest.mark.parametrize("code, works", [(0, True), (3, False)])
def test_apptainer_is_tried_on_an_image(tmp_path, monkeypatch, code, works):
    program, image = tmp_path / "apptainer", tmp_path / "cpu.sif"
    program.write_text(f"#!/bin/sh\necho FATAL: no namespaces\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert try_apptainer([image])[0] is None  # no image: nothing was tried, nothing is claimed
    image.touch()
    tried, note = try_apptainer([image])
    assert tried is works and (works or "no namespaces" in note)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert try_apptainer([image]) == (None, "not installed")


def test_another_image_than_expected_fails(tmp_path, monkeypatch):
    marker = written(tmp_path, imageDOTjson='{"digest": "sha256:aa"}') / "image.json"
    monkeypatch.setattr("sparkgpt.image.MARKER", marker)
    for expected, level in (("sha256:aa", []), ("sha256:bb", [NO])):
        monkeypatch.setenv("SPARKGPT_EXPECT_IMAGE", expected)
        state = libraries.read_container([])
        assert state.digest == "sha256:aa"
        assert levels(describe.container(state), "image") == level
        software = dataclasses.replace(SOFTWARE, container=state)
        assert diagnosis.diagnose(facts(software=software), "").fits == (not level)


# The device.


def test_which_builds_of_torch_serve_a_gb10():
    assert fits_build((12, 1), ("sm_90", "sm_120"), "13.0") == ""
    assert fits_build((12, 1), ("sm_90", "compute_90"), "12.8") == ""
    assert "sm_121" in fits_build((12, 1), ("sm_80", "sm_90", "sm_100"), "12.6")
    assert "sm_121" in fits_build((12, 1), ("sm_120a", "compute_120a"), "13.0")
    assert "sm_120" in fits_build((12, 0), ("sm_121",), "13.0")
    assert fits_build((9, 0), ("sm_90a",), "13.0") == ""
    old = dataclasses.replace(GB10, cuda="12.8")
    assert levels(describe.devices(HOST, GB10), "torch build") == [OK]
    assert levels(describe.devices(HOST, old), "torch build") == [WARN]


def test_unified_memory_counts_what_the_host_has_available():
    said = next(f for f in describe.devices(HOST, GB10) if f.what == "device memory")
    assert "22.0 GiB" in said.detail  # 30 available less the floor of 8, not the device's free 3
    own = dataclasses.replace(GB10, unified=False)
    said = next(f for f in describe.devices(HOST, own) if f.what == "device memory")
    assert "3.0 GiB free of 120.0 GiB" in said.detail


def test_a_driver_that_torch_does_not_see():
    blind = dataclasses.replace(CPU, driver="580.95")
    assert levels(describe.devices(HOST, blind), "cuda") == [WARN]
    fit = judge(PROFILES["gpu"], HOST, blind, SOFTWARE)
    assert [o.advice for o in fit.obstacles] == ["make env TORCH=cu130"]


def test_attention_back_ends_of_this_device_compute():
    backends = read_device("cpu").backends
    assert {name for name, reason in backends.items() if not reason} == {
        "tiles", "sdpa", "sdpa-expanded", "sdpa-view",
    }  # fmt: skip
    failing = dataclasses.replace(GB10, backends={"varlen": "no kernel image"})
    assert levels(describe.attention(failing), "chosen") == [NO]


def test_a_back_end_may_fail_in_any_way(monkeypatch):
    class CompilationError(Exception):  # as triton's, of no standard class
        pass

    def fails(name, device):
        raise CompilationError("no C compiler\nmore")

    monkeypatch.setattr(device, "attends", fails)
    reasons = device.try_backends(torch.device("cpu"))
    assert {reasons[name] for name in ("sdpa", "sdpa-view")} == {"no C compiler"}
    assert "needs a CUDA device" in reasons["triton"]


# Profiles.


def test_what_fits_a_machine_without_a_gpu():
    fits = [judge(wanted, HOST, CPU, SOFTWARE) for wanted in PROFILES.values()]
    assert {fit.name for fit in fits if fit.fits} == {"cpu", "smoke"}
    assert preferred(fits, CPU).name == "cpu"
    assert diagnosis.diagnose(facts(), "").fits
    assert not diagnosis.diagnose(facts(), "gpu").fits
    with pytest.raises(UserError, match="choose from cpu, gb10"):
        diagnosis.diagnose(facts(), "gb11")


def test_what_fits_a_gb10():
    pinned = dataclasses.replace(PROFILES["gb10"], unpinned=())
    host = dataclasses.replace(HOST, memory_available=110 * GIB)
    fit = judge(pinned, host, GB10, SOFTWARE)
    assert fit.fits and preferred([fit, judge(PROFILES["gpu"], host, GB10, SOFTWARE)], GB10) is fit
    small_one = judge(pinned, HOST, GB10, SOFTWARE)
    assert "dense06b needs about" in small_one.obstacles[0].reason
    assert (
        "not pinned: train, val"
        in judge(PROFILES["gb10"], host, GB10, SOFTWARE).obstacles[0].reason
    )


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"memory_available": GIB + 100 * 2**20}, "of memory at a window of 2,048"),
        ({"disk_free": 2**20}, "of disk, /x has 1.0 MiB"),
    ],
)
def test_why_the_default_profile_does_not_fit(change, reason):
    found = diagnosis.diagnose(facts(dataclasses.replace(HOST, **change)), "")
    cpu = next(fit for fit in found.profiles if fit.name == "cpu")
    assert reason in cpu.obstacles[0].reason and not found.fits


def test_missing_libraries_stop_a_profile():
    lacking = dataclasses.replace(SOFTWARE, versions=SOFTWARE.versions | {"mlx-lm": None})
    fit = judge(PROFILES["cpu"], HOST, CPU, lacking)
    assert [o.reason for o in fit.obstacles] == ["mlx-lm not installed"]
    assert judge(PROFILES["cpu"], HOST, CPU, SOFTWARE).fits


def test_export_checks_that_would_fill_the_memory():
    host = dataclasses.replace(HOST, cores_usable=64, memory_available=4 * GIB)
    (caution,) = judge(PROFILES["cpu"], host, CPU, SOFTWARE).cautions
    assert caution.advice == "make reproduce PROFILE=cpu CORES=3"


def test_without_torch_or_a_device_that_computes():
    found = diagnosis.diagnose(facts(device=None, rates=None), "")
    assert not found.fits and levels(found.findings, "torch")[-1] == NO
    found = diagnosis.diagnose(facts(rates=None), "")
    assert not found.fits and found.profiles


# Formulas.


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_dim": 96, "head_dim": 32},
        {"num_experts": 4, "moe_intermediate_size": 32},
        {"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 3},
    ],
)
def test_what_the_backward_needs_is_what_torch_saves(change):
    config, positions, saved = small(model_layers=8, **change), 512, {}
    model = Transformer(config, attention_backend="tiles", kernels=kernels_of(TrainConfig(), "cpu"))
    init_weights(model, TrainConfig())
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # kept, so that no other has its address
        return tensor

    documents = np.arange(positions - 1, dtype=np.uint8)
    cache = SimpleNamespace(document=lambda index: documents)
    window = make_window(cache, [0], positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nats, _ = window_loss(model, window)
    elements = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 4
    elements -= model.lm_head.weight.numel()  # its gradient, which is no matter of positions
    expected = saved_elements(config, compiled=False) - 3 * 259  # in passing
    assert elements / positions == pytest.approx(expected, rel=0.02)
    assert nats.requires_grad


def test_hidden_parameters_are_those_under_muon(variant):
    groups = parameter_groups(randomised(variant), TrainConfig())
    held = sum(p.numel() for g in groups if g.optimizer == "muon" for p in g.parameters)
    assert hidden_parameters(variant) == held


TINY = {
    "model_layers": 4, "model_dim": 128, "attention_heads": 2, "kv_heads": 1, "head_dim": 64,
    "intermediate_size": 384, "moe_intermediate_size": 192, "max_position_embeddings": 1536,
}  # fmt: skip


@pytest.mark.parametrize(
    "shape, window, measured",
    [
        (TINY, 2048, 534),
        (TINY | {"num_experts": 8}, 2048, 580),
        (TINY, 16384, 1321),
        ({"model_layers": 6}, 2048, 1264),  # 19M parameters
    ],
)
def test_memory_against_measured_trainers(shape, window, measured):
    """Peak MiB of trainers on a CPU; never below, at most 10 % above."""
    model, train = ModelConfig(**shape), TrainConfig(tokens_per_batch=window)
    need = memory_need(model, train, parameter_counts(model)["total"], "cpu") / 2**20
    assert measured <= need <= 1.1 * measured


def test_documented_needs_are_those_of_the_formulas():
    shown = lambda need: f"{need / GIB:.{1 if need < GIB else 0}f} GiB"
    rows = [
        line.split("|")
        for line in (ROOT / "docs/machines.md").read_text().splitlines()
        if line.endswith(" GiB |")
    ]
    found = {row[2].split("`")[1]: (row[4].strip(), row[5].strip()) for row in rows}
    fits = [judge(wanted, HOST, CPU, SOFTWARE) for wanted in PROFILES.values()]
    assert found == {fit.name: (shown(fit.memory), shown(fit.disk)) for fit in fits}


def test_floors_of_a_gb10_against_published_ones():
    """Published for 49,152 tokens: 334 ms at 220 GB/s for 50M; 1,681 ms at 98 TFLOP/s for 0.6B,
    without Newton-Schulz."""
    train = TrainConfig()
    step = ceiling(ModelConfig(), train, "cuda", 98e12, 220e9, "measured")
    assert step.memory_floor == pytest.approx(0.334, rel=0.03) and step.bound == "memory"
    assert step.traffic < step.traffic_unfused
    step = ceiling(SHAPE_06B, train, "cuda", 98e12, 220e9, "measured")
    assert step.model_flops / 98e12 == pytest.approx(1.681, rel=0.01) and step.bound == "compute"
    assert mfu(step.model_flops, 2 * 1.681, 98e12) == pytest.approx(0.5, rel=0.01)


def test_specification_is_said_beside_what_is_measured():
    said = [f for f in describe.rates(RATES, "NVIDIA GB10") if f.what == "specification"]
    assert "125.0 TFLOP/s dense bf16, 273 GB/s" in said[0].detail
    assert not [f for f in describe.rates(RATES, "unheard of") if f.what == "specification"]
    for spec in SPECIFICATIONS.values():  # bytes a second are a few hundredths of FLOP a second
        assert 100 < spec.gemm / spec.copy < 600 and spec.note


# Ranks.


def told(rank, **change):
    host = dataclasses.replace(HOST, hostname=f"host{rank}", **change.pop("host", {}))
    return dataclasses.replace(
        scaling.RankFacts(rank, host, GB10, RATES, {"torch": "2.13.0", "code": "abc"}), **change
    )


def test_two_nodes_against_published_speed_up():
    """Published: 1.86 to 1.91 times on two GB10, dense 50M at 401 ms a step, 23.7 GB/s."""
    step = ceiling(ModelConfig(), TrainConfig(), "cuda", 98e12, 220e9, "measured")
    measured = [scaling.AllReduce(4096, 40e-6), scaling.AllReduce(2**26, 40e-6 + 2**26 / 23.7e9)]
    total = parameter_counts(ModelConfig())["total"]
    assert scaling.all_reduce_seconds(4 * total, measured) == pytest.approx(8.58e-3, rel=0.01)
    speedup = scaling.predicted_speedup(step, total, 2, measured, 220e9)
    assert 1.86 < speedup < 1.95
    assert measured[1].bus_rate(2) == measured[1].rate
    assert measured[1].bus_rate(4) == pytest.approx(1.5 * measured[1].rate)


def test_ranks_that_disagree_are_named():
    other = told(1, alike={"torch": "2.12.0", "code": "abc"})
    (finding,) = scaling.agreement([told(0), other])
    assert finding.level == NO and "torch 2.12.0 (rank 0: 2.13.0)" in finding.detail
    assert levels(scaling.agreement([told(0), told(1)]), "ranks agree") == [OK]
    (finding,) = scaling.agreement([told(0), told(1, device=CPU)])
    assert "device cpu (rank 0: NVIDIA GB10)" in finding.detail


def test_hints_about_interfaces():
    up = {"interfaces": (Interface("eth0", 1500, 1000), Interface("enp1s0", 1500, 200_000))}
    open_ends = [told(0, host=up), told(1, host=up)]
    found = scaling.interface_hints(open_ends)
    assert levels(found, "interface") == [WARN, WARN] and levels(found, "MTU") == [WARN, WARN]
    assert "export GLOO_SOCKET_IFNAME=enp1s0 export NCCL_SOCKET_IFNAME=enp1s0" in found[0].advice
    right, wrong = {"NCCL_SOCKET_IFNAME": "enp"}, {"NCCL_SOCKET_IFNAME": "ib0"}
    pair = [told(0, host=up, variables=right), told(1, host=up, variables=wrong)]
    assert levels(scaling.interface_hints(pair), "interface") == [OK, NO]
    assert levels(scaling.interface_hints(open_ends[:1]), "interface") == [OK]


def test_ranks_that_do_not_meet(monkeypatch):
    from sparkgpt.doctor.ranks import meeting

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(UserError, match="rank 1: .*no address.*GLOO_SOCKET_IFNAME=nope0") as caught:
        with meeting(1):
            raise RuntimeError("no address\nsomewhere")
    assert caught.value.exit_code == 1 and "--resume" not in str(caught.value)


def test_ranks_that_share_cores():
    host = {"hostname": "one", "cores_usable": 8}
    pair = [dataclasses.replace(told(r), host=dataclasses.replace(HOST, **host)) for r in (0, 1)]
    (finding,) = scaling.sharing(pair)
    assert finding.level == WARN and finding.advice == "export OMP_NUM_THREADS=4"


# The command.


def run(*words, launcher=(), **environment):
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "sparkgpt", "doctor", *words],
        env=os.environ | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return result


def test_one_process_says_the_same_in_lines_and_in_json():
    lines, value = run("--profile", "gpu"), run("--profile", "gpu", "--json")
    found = json.loads(value.stdout)
    assert found["profile"] == "gpu" and found["ok"] == (value.returncode == 0)
    said = [line for line in lines.stdout.splitlines() if line and not line.endswith(":")]
    assert len(said) == pytest.approx(len(found["findings"]), abs=1)  # other programs come and go
    assert {line.split()[0] for line in said} <= {OK, WARN, NO}
    if not torch.cuda.is_available():
        assert found["ok"] is False and found["command"] is None
        assert "GB10's specified" in lines.stdout
    assert found["facts"]["rates"]["gemm"] > 1e8 and set(found["ceilings"]) == {
        "dense50m",
        "moe8x2",
    }


def test_two_ranks_report_each_other_and_the_network():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = run("--json", launcher=torchrun, OMP_NUM_THREADS="1")
    found = json.loads(result.stdout)
    assert result.returncode == 0 and found["ok"], result.stderr
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    sizes = found["allreduce"]["sizes"]
    assert sizes[0]["bytes"] == 4096 and all(one["seconds"] > 0 for one in sizes)
    assert all(1 < speedup <= 2 for speedup in found["speedup"].values())
    assert set(found["speedup"]) == {"dense", "moe", "adamw"}


def test_a_finding_is_one_line():
    line = Finding("a", NO, "what", "one\ntwo", "do this").line()
    assert line.startswith("no    what ") and line.endswith("one two -> do this")
    assert [size(n) for n in (12, 1536, 3 * GIB)] == ["12 B", "1.5 KiB", "3.0 GiB"]
