"""Which kernels a run uses: by its flags, and by what `sparkgpt autotune` recorded."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkgpt.config import TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.files import read_json
from sparkgpt.fingerprint import module_path, modules_of
from sparkgpt.ops.kernels.specimen import Config


@dataclass(frozen=True)
class Kernels:
    """The fused operations of a model and its optimizer; all off: the plain reference path.

    On CUDA they are Triton kernels; on a CPU the same formulas, forward and backward, in torch.
    `configs` are those that a record chose: `family/shape` -> `kernel:configuration;...`. They
    reach the launchers as an argument of the operators, so that nothing is global.
    """

    qk_rope: bool = False
    swiglu: bool = False
    dispatch: bool = False
    head: bool = False
    muon: bool = False
    configs: Mapping[str, str] = field(default_factory=dict)

    def configs_of(self, family: str, **sizes: int) -> str:
        """The chosen configurations of a family's kernels at a shape, for `config_of`; empty when
        none was recorded: then the kernels' defaults hold."""
        return self.configs.get(f"{family}/{shape_text(**sizes)}", "")


def kernels_of(train: TrainConfig, device: str) -> Kernels:
    """What the flags ask for on 'cpu' or 'cuda'. Those left out are on for CUDA, and on a CPU where
    our formulas take less time and memory than autograd's."""
    on = lambda flag, default=device == "cuda": default if flag is None else flag
    return Kernels(
        qk_rope=on(train.fused_qk_rope, True),
        swiglu=on(train.fused_swiglu, True),
        dispatch=on(train.fused_dispatch),
        head=on(train.chunked_head, True),
        muon=on(train.triton_muon),
    )


def attention_key(heads: int, kv_heads: int, head_dim: int) -> str:
    """Name of a choice in the record: the shape that it was measured at."""
    return f"attention/q{heads}-kv{kv_heads}-h{head_dim}"


def attention_choice(path: str, device: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """The recorded back end for a shape on 'cpu' or 'cuda'.

    UserError when the record lacks it or is another device's: nothing is guessed.
    """
    key = attention_key(heads, kv_heads, head_dim)
    record = read_json(path)
    choices = record.get("choices", {}) if record.get("device", {}).get("type") == device else {}
    if key not in choices:
        raise UserError(
            f"--autotune {path} holds no choice for {key} on {device}; make a record with "
            f"`sparkgpt autotune --attention {heads},{kv_heads},{head_dim}`"
        )
    return choices[key]["winner"]


def shape_text(**sizes: int) -> str:
    """As `D512-E1-F1536`: what a kernel's configuration depends on, by name."""
    return "-".join(f"{name}{size}" for name, size in sorted(sizes.items()))


def kernel_code() -> str:
    """Digest of the measured kernels' sources: timings of other code choose nothing. Of those that
    `autotune` depends on, so that whatever changes it makes a record stale too."""
    digest = hashlib.sha256()
    for name in modules_of("autotune"):
        if name.startswith("sparkgpt.ops.kernels."):
            source = module_path(name).read_bytes()
            digest.update(name.encode() + b"\0" + hashlib.sha256(source).digest())
    return digest.hexdigest()


def kernel_configs(path: str, device: Mapping[str, object]) -> dict[str, str]:
    """`Kernels.configs` from a record for `device`, as `provenance.device_state` describes it.

    Empty for a record without kernels, such as a CPU's. UserError when its kernels were measured on
    another device or are other code: nothing is guessed, and nothing tuned while training.
    """
    configs: dict[str, list[str]] = {}
    for key, choice in sorted(_kernel_choices(path, device).items()):
        place, _, kernel = key.rpartition("/")
        configs.setdefault(place, []).append(f"{kernel}:{choice['winner']}")
    return {place: ";".join(parts) for place, parts in configs.items()}


def _kernel_choices(path: str, device: Mapping[str, object]) -> dict[str, dict]:
    record = read_json(path)
    kernels = record.get("kernels")
    if kernels is None:
        return {}
    again = "make a record here with `sparkgpt autotune`"
    was = record.get("device", {})
    for name in ("type", "name", "capability"):
        if was.get(name) != device.get(name):
            raise UserError(
                f"--autotune {path} holds kernels measured on {was.get('name') or was.get('type')}"
                f", this is {device.get('name') or device['type']}; {again}"
            )
    if kernels.get("code") != kernel_code():
        raise UserError(f"--autotune {path} holds choices for other code of the kernels; {again}")
    try:
        for choice in kernels["choices"].values():
            Config.parse(choice["winner"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--autotune {path} is damaged ({error}); {again}") from error
    return kernels["choices"]
