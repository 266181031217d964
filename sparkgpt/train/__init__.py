"""Training: the one place that knows every part. `python -m sparkgpt.train FLAGS` runs it."""
