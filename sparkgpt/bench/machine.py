"""Where a benchmark ran and with what."""

import importlib.metadata

from sparkgpt.provenance import platform_state, tree_state, versions


def machine() -> dict:
    """Processor, cores, threads, system; versions of libraries; the tree that was measured."""
    libraries = versions()
    try:
        libraries["transformers"] = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        pass
    tree = tree_state()
    kept = {name: tree[name] for name in ("commit", "hash", "dirty")}
    return {"platform": platform_state(), "versions": libraries, "tree": kept}
