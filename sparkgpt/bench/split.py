"""Where a step's time goes: the profiler's self CPU time, by kind of operation.

Only what ran inside the step's region counts, and each moment once (self time is without that of
the operations called), so the shares add up to 1. torch has one thread meanwhile: the profiler
doesn't see what others do while the step waits for them. Under it, small operations take longer
than they would alone.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

STEP, DATA, OPTIMIZER = "bench.step", "bench.data", "bench.optimizer"  # names of regions
CATEGORIES = ("gemm", "attention", "elementwise", "optimizer", "data", "other")

# An operation belongs to a region, or to attention, when it or anything that called it does.
REGIONS = {DATA: "data", OPTIMIZER: "optimizer"}
ATTENTION = re.compile(r"attention|sdpa", re.IGNORECASE)
GEMM = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|_?grouped_mm|mkldnn_linear.*)$|mkl::|mkldnn::"
)
# Work on each element or row, and moving them. Python autograd functions go by their own names.
ELEMENTWISE = re.compile(
    r"aten::_?(add|sub|mul|div|neg|pow|square|sqrt|rsqrt|exp|log|sigmoid|silu|cos|sin|reciprocal|lerp"
    r"|addcmul|addcdiv|sum|mean|max|amax|abs|where|clamp|maximum|eq|ne|lt|ge|gt|le|bitwise_\w+"
    r"|softmax|log_softmax|nll_loss\w*|cross_entropy\w*|topk|sort|argsort|cumsum|scatter\w*|gather"
    r"|embedding\w*|index\w*|cat|stack|split\w*|chunk|copy|to_copy|to|contiguous|clone|fill|zero"
    r"|zeros\w*|ones\w*|full\w*|empty\w*|resize|new_\w+|view\w*|reshape\w*|unsafe_view|t|transpose"
    r"|permute|expand\w*|slice\w*|select\w*|squeeze|unsqueeze|flatten|narrow\w*|as_strided"
    r"|repeat_interleave|detach|arange|item|local_scalar_dense|diff|isfinite|special_entr"
    r"|linalg_vector_norm|norm|unbind|alias|result_type|foreach_\w+|complex|polar|real|imag"
    r"|aminmax|floor_divide|numpy_T|resolve_conj|resolve_neg|value_selecting_reduction\w*"
    r"|rms_norm|fused_rms_norm\w*|native_layer_norm\w*)(_backward\w*)?_?$"
    r"|^detach_?$|rms_?norm|rope|rotar|swiglu|silu|cross_?entropy|dispatch|collect|combine",
    re.IGNORECASE,
)
# Nodes of torch's own end in a digit; autograd functions written in Python don't.
AUTOGRAD = re.compile(r"^autograd::engine::|^\w+Backward\d+$|^torch::autograd::")


def category(event) -> str:
    """The category of one profiler event, by its name and those of its callers (`cpu_parent`)."""
    names = [event.name]
    caller = event.cpu_parent
    while caller is not None:
        names.append(caller.name)
        caller = caller.cpu_parent
    for name in names:
        if name in REGIONS:
            return REGIONS[name]
    if any(ATTENTION.search(name) for name in names):
        return "attention"
    own = names[0]
    if AUTOGRAD.search(own):
        return "other"  # around a node, no work of the node's kind
    if GEMM.search(own):
        return "gemm"
    return "elementwise" if ELEMENTWISE.search(own) else "other"


def split(events: Iterable) -> dict:
    """Shares of the time inside the STEP regions by category, which add up to 1.

    An event has `name`, `cpu_parent` and `self_cpu_time_total` (microseconds). `other` lists
    what is in that category with its shares: unknown operations by name, Python between operations,
    and autograd's own work around the nodes of its graph.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    others: dict[str, float] = defaultdict(float)
    for event in events:
        if not _inside(event):
            continue
        kind, own = category(event), event.self_cpu_time_total / 1e6
        seconds[kind] += own
        if kind == "other":
            others[_other_name(event.name)] += own
    total = sum(seconds.values())
    if not total:
        raise ValueError(f"no event lies inside a region {STEP!r}")
    ordered = sorted(others.items(), key=lambda item: -item[1])
    return {
        "shares": {kind: value / total for kind, value in seconds.items()},
        "seconds": seconds,
        "other": {name: value / total for name, value in ordered},
    }


def profile_steps(step: Callable[[int], object], indices: Iterable[int]) -> dict:
    """`split` of the steps with these indices, run on one thread under torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for index in indices:
                with record_function(STEP):
                    step(index)
    finally:
        torch.set_num_threads(usual)
    return split(profiler.events())


def _other_name(name: str) -> str:
    if name == STEP:
        return "Python between operations"
    return "autograd's engine" if AUTOGRAD.search(name) else name


def _inside(event) -> bool:
    while event is not None:
        if event.name == STEP:
            return True
        event = event.cpu_parent
    return False
