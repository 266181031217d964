"""Benchmarks: how fast a CPU training step is, where its time goes, what data and starts cost."""
