"""Optimizers: Muon, AdamW, their parameter groups and the schedule."""
