"""Every number that a user can set, once: the model's shape and the run's recipe.

A field is also a flag (`sparkgpt.flags`), its help text the field's metadata. Standard library
only, so that `--help` and the pipeline never wait for torch.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from sparkgpt.errors import UserError

MOST_THREADS = 65_536

# What may change between the attempts of one run: cadence of logs and saves, places, what becomes
# of bad steps, and what is allowed but not exact in the last bits (`inexact_values`).
FREE = {
    "train_path", "val_path", "run_name", "out_dir", "max_train_steps", "log_every", "save_every",
    "keep_last", "save_final", "hf_export", "resume", "device", "threads", "compile",
    "attention_backend", "triton_attention", "fused_qk_rope", "fused_swiglu", "fused_dispatch",
    "chunked_head", "triton_muon", "autotune_gemm", "autotune",
    "ddp_timeout_seconds", "expect_code", "publish", "attempt", "on_bad_step", "code_as",
    "wandb", "wandb_project", "wandb_entity", "wandb_run_name", "wandb_tags",
}  # fmt: skip


def flag(default: Any, text: str, **options: Any) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": text, **options})


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen3 (dense) or Qwen3-MoE decoder over bytes; names follow the flags.

    Raises UserError when the numbers don't fit together.
    """

    model_layers: int = flag(16, "decoder layers")
    model_dim: int = flag(512, "width of the residual stream")
    attention_heads: int = flag(4, "query heads")
    kv_heads: int = flag(2, "key/value heads; must divide --attention-heads")
    head_dim: int = flag(128, "dimension of one head (even)")
    intermediate_size: int = flag(1536, "hidden width of a dense SwiGLU MLP")
    rope_theta: float = flag(1_000_000.0, "RoPE base")
    max_position_embeddings: int = flag(4096, "longest document, in positions (bytes + 1)")
    num_experts: int = flag(0, "experts in a sparse layer; 0 makes every layer dense")
    num_experts_per_tok: int = flag(2, "experts that each position is routed to")
    moe_intermediate_size: int = flag(768, "hidden width of one expert")
    decoder_sparse_step: int = flag(1, "layer i is sparse when (i + 1) %% N == 0")
    mlp_only_layers: tuple[int, ...] = flag((), "zero-based layers kept dense, as 0,5")
    norm_topk_prob: bool = flag(True, "divide the selected router probabilities by their sum")
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_numbers(self, most=2**24)
        for name in ("model_layers", "model_dim", "attention_heads", "kv_heads", "head_dim"):
            _at_least(self, name, 1)
        for name in ("intermediate_size", "max_position_embeddings", "decoder_sparse_step"):
            _at_least(self, name, 1)
        _at_least(self, "num_experts", 0)
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"--rope-theta {self.rope_theta}: must be above 0")
        if self.attention_heads % self.kv_heads:
            raise UserError(
                f"--kv-heads {self.kv_heads} does not divide --attention-heads "
                f"{self.attention_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise UserError(
                f"--head-dim {self.head_dim} is odd; RoPE rotates pairs, choose an even one"
            )
        for layer in self.mlp_only_layers:
            if not 0 <= layer < self.model_layers:
                raise UserError(
                    f"--mlp-only-layers names layer {layer}, but there are {self.model_layers} "
                    f"layers, 0 to {self.model_layers - 1}"
                )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        _at_least(self, "moe_intermediate_size", 1)
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"--num-experts-per-tok {self.num_experts_per_tok} must lie between 1 and "
                f"--num-experts {self.num_experts}"
            )
        if not self.sparse_layers:
            raise UserError(
                f"--num-experts {self.num_experts}, but no layer is sparse with "
                f"--decoder-sparse-step {self.decoder_sparse_step} and --mlp-only-layers "
                f"{','.join(map(str, self.mlp_only_layers)) or '(none)'}; change one of them"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether zero-based `layer` has experts (the rule of transformers' Qwen3MoeConfig)."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the layers with experts."""
        return tuple(i for i in range(self.model_layers) if self.is_sparse(i))


@dataclass(frozen=True)
class TrainConfig:
    """The recipe of one run and how it is carried out. Raises UserError on impossible values."""

    train_path: str = flag("lang_data/fineweb_1b.jsonl", "training documents: a cache or JSONL")
    val_path: str = flag("", "held-out documents: a cache or JSONL; empty: no validation")
    run_name: str = flag("run", "name of the run's folder inside --out-dir")
    out_dir: str = flag("checkpoints", "where runs are written")
    target_tokens: float = flag(1e9, "real tokens to train on, over as many epochs as that takes")
    max_train_steps: int = flag(0, "stop after this many steps; the schedule stays (0: all)")
    lr_schedule_steps: int = flag(0, "length of the schedule in steps (0: from --target-tokens)")
    tokens_per_batch: int = flag(49_152, "positions in one window")
    accumulate: int = flag(1, "windows that one process steps over at once")
    pack_buffer: int = flag(32_768, "documents that best fit may choose from (0: next fit)")
    optimizer: str = flag(
        "muon", "muon (with AdamW for the rest) or adamw alone", choices=("muon", "adamw")
    )
    mup_base_dim: int = flag(256, "width at which the hyperparameters were tuned")
    mup_emb_std: float = flag(0.02, "initial std of the embedding")
    mup_hidden_std: float = flag(0.02, "initial std of hidden matrices at --mup-base-dim")
    router_init_std: float = flag(0.02, "initial std of the routers")
    router_aux_loss_coef: float = flag(1e-3, "weight of the load-balancing loss")
    router_lr: float = flag(0.0, "router learning rate (0: --adamw-lr)")
    muon_lr: float = flag(4e-3, "learning rate of hidden matrices under Muon")
    muon_momentum: float = flag(0.95, "Muon's momentum")
    adamw_lr: float = flag(5e-4, "learning rate of AdamW's parameters")
    adamw_matrix_lr: float = flag(
        0.0, "rate of hidden matrices under --optimizer adamw, before muP's 1/m (0: --adamw-lr)"
    )
    weight_decay: float = flag(0.01, "decoupled weight decay of embedding, gains and head")
    warmup_frac: float = flag(0.02, "share of the schedule that warms up (at least 10 steps)")
    lr_decay_factor: float = flag(0.1, "the cosine ends at this share of the peak rate")
    seed: int = flag(0, "seed of the initial weights")
    data_seed: int = flag(-1, "seed of the data order (-1: --seed)")
    val_tokens: int = flag(2_000_000, "held-out real tokens to evaluate, from the file's start")
    val_interval_frac: float = flag(0.05, "validate every this share of the schedule")
    val_interval_steps: int = flag(0, "validate every this many steps instead (0: by share)")
    log_every: int = flag(50, "steps between logged lines")
    save_every: int = flag(0, "steps between resumable checkpoints (0: none)")
    keep_last: int = flag(3, "resumable checkpoints to keep")
    save_final: bool = flag(False, "write model_final.safetensors and hf/ at the end")
    hf_export: bool = flag(True, "write Hugging Face directories beside saved weights")
    on_bad_step: str = flag(
        "skip",
        "when loss or gradient is not finite: leave the step out, up to 3 in a row, or stop",
        choices=("skip", "stop"),
    )
    resume: bool = flag(False, "continue from the newest checkpoint, if there is one")
    device: str = flag("auto", "where to train", choices=("auto", "cpu", "cuda"))
    threads: int = flag(0, "CPU threads (0: torch's choice); recorded, it can change last bits")
    compile: bool | None = flag(None, "torch.compile the model (default: on CUDA only)")
    attention_backend: str = flag(
        "auto",
        "varlen attention",
        choices=("auto", "tiles", "sdpa", "triton", "flash-attn", "varlen"),
    )
    triton_attention: bool | None = flag(
        None, "let --attention-backend auto take our Triton kernel (default: on CUDA only)"
    )
    fused_qk_rope: bool | None = flag(None, "q/k norm and RoPE in one pass each way (default: on)")
    fused_swiglu: bool | None = flag(
        None, "SwiGLU, MLP's and experts', by our own kernels or formulas (default: on)"
    )
    fused_dispatch: bool | None = flag(
        None, "gather to experts and combine in one pass each (default: on CUDA only)"
    )
    chunked_head: bool | None = flag(
        None, "head and cross-entropy in chunks, logits never whole (default: on)"
    )
    triton_muon: bool | None = flag(
        None, "Muon's momentum and Newton-Schulz by our kernels (default: on CUDA only)"
    )
    autotune_gemm: bool | None = flag(
        None, "let inductor try Triton GEMMs on GPUs of any size (default: on CUDA only)"
    )
    autotune: str = flag("", "record of `sparkgpt autotune` to take kernel choices from")
    ddp_timeout_seconds: int = flag(300, "how long a rank waits for the others")
    expect_code: str = flag("", "refuse to run unless the training code has this digest")
    code_as: str = flag("", "digest of other code that this was accepted as, for its checkpoints")
    attempt: int = flag(1, "the pipeline's count; a later one won't repeat a run stopped by rule")
    publish: str = flag("", "folder that receives the final files once the run is complete")
    wandb: bool = flag(False, "log to Weights & Biases as well")
    wandb_project: str = flag("sparkgpt", "its project")
    wandb_entity: str = flag("", "its entity")
    wandb_run_name: str = flag("", "its run name (empty: --run-name)")
    wandb_tags: str = flag("", "its tags, separated by commas")

    def __post_init__(self) -> None:
        _check_numbers(self, most=2**62)
        for name in (
            "tokens_per_batch",
            "accumulate",
            "mup_base_dim",
            "log_every",
            "keep_last",
            "ddp_timeout_seconds",
        ):
            _at_least(self, name, 1)
        for name in (
            "max_train_steps",
            "lr_schedule_steps",
            "pack_buffer",
            "val_interval_steps",
            "save_every",
            "threads",
            "val_tokens",
        ):
            _at_least(self, name, 0)
        for name in (
            "muon_lr",
            "adamw_lr",
            "adamw_matrix_lr",
            "router_lr",
            "weight_decay",
            "router_aux_loss_coef",
            "mup_emb_std",
            "mup_hidden_std",
            "router_init_std",
        ):
            _at_least(self, name, 0)
        for name in ("val_interval_frac", "warmup_frac", "lr_decay_factor", "muon_momentum"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"{flag_name(name)} {value}: must lie between 0 and 1")
        _at_least(self, "target_tokens", 1)
        if self.threads > MOST_THREADS:
            raise UserError(f"--threads {self.threads}: must be at most {MOST_THREADS}")
        if not self.run_name.isprintable() or not self.run_name.strip(".") or "/" in self.run_name:
            raise UserError(f"--run-name {self.run_name!r}: must be a plain folder name")

    @property
    def order_seed(self) -> int:
        """Seed of the data order: --data-seed, or --seed when that is -1."""
        return self.seed if self.data_seed < 0 else self.data_seed


def flag_name(name: str) -> str:
    """`mup_base_dim` -> `--mup-base-dim`."""
    return "--" + name.replace("_", "-")


def from_values(config: type, values: dict[str, Any]) -> Any:
    """Build a config dataclass from those entries of `values` (parsed flags, JSON) that it has."""
    names = {item.name for item in dataclasses.fields(config)}
    chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
    return config(**chosen)


def _check_numbers(config: Any, most: int) -> None:
    """UserError for a number that is not finite, or a whole one beyond `most` either way."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag_name(item.name)} {value}: must be a finite number")
        if isinstance(value, int) and abs(value) > most:
            raise UserError(f"{flag_name(item.name)} {value}: must be at most {most}")


def _at_least(config: Any, name: str, lowest: int) -> None:
    value = getattr(config, name)
    if value < lowest:
        raise UserError(f"{flag_name(name)} {value}: must be at least {lowest}")
