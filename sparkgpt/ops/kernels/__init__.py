"""Triton kernels only, one file a family; `sparkgpt.ops` has the plain reference beside each.

Nothing here but `specimen`, which is data, is imported before an operation runs on CUDA, so that a
CPU needs no triton.
"""
