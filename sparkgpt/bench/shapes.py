"""What is benchmarked: the model's shape, the window, the documents. Standard library only."""

from dataclasses import dataclass, replace

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.errors import UserError

DEFAULT = {
    "model_layers": 4,
    "model_dim": 128,
    "attention_heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "intermediate_size": 384,
}
WINDOW = 8192
LONGEST = 2047  # bytes of a document
EXPERTS, CHOSEN = 8, 2
CHUNK = 2048  # positions of a sequence without masks


@dataclass(frozen=True)
class Settings:
    """The choices of one benchmark. `data`: a byte cache, or empty for synthetic documents of at
    most `longest` bytes; `window` in positions; `threads` 0 leaves torch's choice."""

    shape: dict[str, int]
    window: int = WINDOW
    longest: int = LONGEST
    rounds: int = 11
    warm_steps: int = 6
    profiled: int = 3
    threads: int = 0
    seed: int = 0
    data: str = ""
    moe: bool = False

    @property
    def model(self) -> ModelConfig:
        """The dense model. UserError as from ModelConfig."""
        return ModelConfig(**self.shape, max_position_embeddings=max(self.longest, 1) + 1)

    @property
    def moe_model(self) -> ModelConfig:
        """EXPERTS experts, CHOSEN a position, as wide together as the dense MLP.

        UserError when its width does not divide.
        """
        hidden = self.shape["intermediate_size"]
        if hidden % CHOSEN:
            raise UserError(
                f"--intermediate-size {hidden} does not divide by the {CHOSEN} experts that a "
                "position takes; choose an even one, or leave --moe out"
            )
        return replace(
            self.model,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            moe_intermediate_size=hidden // CHOSEN,
        )

    def models(self) -> dict[str, ModelConfig]:
        """Those that are timed: `ours`, and `moe` if asked for. UserError as from either."""
        return {"ours": self.model} | ({"moe": self.moe_model} if self.moe else {})

    @property
    def train(self) -> TrainConfig:
        """The recipe's defaults on this window."""
        return TrainConfig(tokens_per_batch=self.window, seed=self.seed, threads=self.threads)


def chunk_of(window: int) -> int:
    """Positions of a sequence of the peer without masks: CHUNK, or a smaller window whole.

    UserError when a window doesn't divide into chunks.
    """
    chunk = min(CHUNK, window)
    if window % chunk:
        raise UserError(f"--window {window}: must be a multiple of {CHUNK}, or smaller than it")
    return chunk
