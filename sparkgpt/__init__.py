"""sparkgpt: a byte-level language-model pretrainer and the reproducible pipeline around it."""

__version__ = "0.1.0"
