"""Writes down what an image holds, inside it, at the end of its build.

contents.txt: its base and each package with version and hash, sorted. image.json names the image by
the sha256 of that list, which is equal for two builds of the same content; the image file's own is
not.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import subprocess
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

HOME = Path("/opt/sparkgpt")


def python_packages(reports: Iterable[Path]) -> list[str]:
    """`pypi NAME VERSION sha256:HEX` of each installed distribution; `-` for pip itself."""
    hashes = {
        canonical(item["metadata"]["name"]): f"sha256:{archive_sha256(item['download_info'])}"
        for report in reports
        for item in json.loads(report.read_text(encoding="utf-8"))["install"]
    }
    return [
        f"pypi {name} {item.version} {hashes.get(name, '-')}"
        for item in importlib.metadata.distributions()
        for name in [canonical(item.metadata["Name"])]
    ]


def archive_sha256(download: dict) -> str:
    """Hash of a wheel or source archive as pip noted it; older ones note none for local files."""
    hashes = download["archive_info"].get("hashes", {})
    if "sha256" in hashes:
        return hashes["sha256"]
    path = Path(urllib.parse.unquote(urllib.parse.urlsplit(download["url"]).path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def system_packages() -> list[str]:
    """`deb NAME:ARCHITECTURE VERSION` of each installed package."""
    form = "${db:Status-Status} deb ${Package}:${Architecture} ${Version}\n"
    listing = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={form}"], check=True, capture_output=True, text=True
    ).stdout
    return [
        line.removeprefix("installed ")
        for line in listing.splitlines()
        if line.startswith("installed ")
    ]


def canonical(name: str) -> str:
    """A package name as the index writes it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--base", required=True, help="what the image was built from")
    parser.add_argument("reports", nargs="+", type=Path, help="reports of `pip install`")
    args = parser.parse_args()
    packages = python_packages(args.reports) + system_packages()
    text = "".join(f"{line}\n" for line in sorted([f"base {args.base}", *packages]))
    (HOME / "contents.txt").write_text(text, encoding="utf-8")
    digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    image = {"target": args.target, "digest": digest, "base": args.base, "packages": len(packages)}
    (HOME / "image.json").write_text(json.dumps(image, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
