"""What the Snakefile and its rules import from the package."""

from sparkgpt.fingerprint import code_digest
from sparkgpt.pipeline.jobs import Jobs
from sparkgpt.pipeline.profiles import MAIN, flag_text, load_profile, read_profile
from sparkgpt.pipeline.values import Unwatched, image_digest, work_folder

__all__ = [
    "MAIN",
    "Jobs",
    "Unwatched",
    "code_digest",
    "flag_text",
    "image_digest",
    "load_profile",
    "read_profile",
    "work_folder",
]
