"""Which container image this runs in, and the refusal to run in another than was asked for.

`containers/build` leaves image.json in each image: its digest is the sha256 of the sorted list of
what the image holds, its base included, so that it is equal for two builds of the same content.
"""

import json
import os
from pathlib import Path

from sparkgpt.errors import UserError

MARKER = Path("/opt/sparkgpt/image.json")
EXPECTED = "SPARKGPT_EXPECT_IMAGE"  # set for each job of a pipeline that runs in containers
RESULTS_SUFFIX = "-apptainer"  # of the folder of results that are made in containers
CACHES = {
    "XDG_CACHE_HOME": "",
    "XDG_CONFIG_HOME": "config",
    "TRITON_HOME": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}


def cache_settings(root: str) -> dict[str, str]:
    """Where libraries in a container keep what they compile, as variables that apptainer passes
    on: its home is the work directory `root`, in which their defaults would be scattered."""
    cache = Path(root, ".cache")
    return {f"APPTAINERENV_{name}": str(cache / folder) for name, folder in CACHES.items()}


def image_digest() -> str | None:
    """`sha256:HEX` of the image that this process runs in; None on the host itself. UserError when
    its marker is damaged."""
    try:
        digest = json.loads(MARKER.read_text(encoding="utf-8"))["digest"]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{MARKER} is damaged ({error}); build this image again") from error
    if type(digest) is not str:
        raise UserError(f"{MARKER} names no digest; build this image again")
    return digest


def check_image() -> None:
    """UserError when $SPARKGPT_EXPECT_IMAGE names an image and this is not it."""
    expected, found = os.environ.get(EXPECTED), image_digest()
    if expected is not None and found != expected:
        place = f"image {found}" if found else "no image"
        raise UserError(
            f"this runs in {place}, but its job was scheduled for image {expected}; start the "
            "pipeline again, after containers/build if an image file was replaced"
        )
