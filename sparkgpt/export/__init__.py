"""Hugging Face directories: written, and checked against the libraries that load them."""
