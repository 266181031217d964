"""Qwen3-shaped dense and mixture-of-experts decoders over bytes."""

from sparkgpt.model.transformer import RouterStats, Transformer

__all__ = ["RouterStats", "Transformer"]
