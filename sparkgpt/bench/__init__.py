"""Benchmarks: how fast a CPU training step is, where its time goes, and what data and starts cost."""
