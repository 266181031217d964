"""The package list of a release: what is installed of the pinned environment, as CycloneDX 1.6.

Written from the metadata of the installed distributions, with the standard library alone: a tool of
its own would be one more pin, and its random serial numbers and times would give other bytes each
time. https://cyclonedx.org/docs/1.6/json/
"""

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from sparkgpt import __version__
from sparkgpt.errors import UserError

PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==", re.M)
LONGEST_LICENSE = 60  # some packages put the whole text there


def bill_of_materials(locks: Iterable[Path]) -> dict[str, Any]:
    """The components of the environment that the lock files name, sorted by name."""
    pinned = {canonical(name) for path in locks for name in PIN.findall(path.read_text("utf-8"))}
    found = {canonical(d.metadata["Name"]): d for d in distributions()}
    ours = {"type": "application", "name": "sparkgpt", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours | {"bom-ref": "sparkgpt", "purl": _purl(**ours)}},
        "components": [_component(found[name]) for name in sorted(pinned & found.keys())],
    }


def check_versions(bill: dict[str, Any], recorded: dict[str, set[str]]) -> None:
    """UserError when a run recorded (library -> versions) another version than is installed."""
    installed = {item["name"]: item["version"] for item in bill["components"]}
    for name, versions in sorted(recorded.items()):
        here = installed.get(canonical(name))
        if here is not None and {_public(version) for version in versions} != {_public(here)}:
            raise UserError(
                f"the runs were made with {name} {', '.join(sorted(versions))}, but {here} is "
                "installed here, and the package list would be of another environment; publish "
                "from the one that trained, or train again"
            )


def canonical(name: str) -> str:
    """A package name as the index writes it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    """A version without its local part: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]


def _component(distribution: Distribution) -> dict[str, Any]:
    name, version = canonical(distribution.metadata["Name"]), distribution.version
    value = {"type": "library", "name": name, "version": version}
    value |= {"bom-ref": f"{name}@{version}", "purl": _purl(**value)}
    license_of = _license(distribution)
    return value | ({"licenses": [license_of]} if license_of else {})


def _purl(name: str, version: str, **_: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def _license(distribution: Distribution) -> dict[str, Any] | None:
    metadata = distribution.metadata
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    named = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith("License :: ")
    ]
    text = "; ".join(named) or (metadata.get("License") or "").strip()
    short = text and "\n" not in text and len(text) <= LONGEST_LICENSE
    return {"license": {"name": text}} if short else None
