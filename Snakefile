"""From pinned bytes to checked exports and tables: `snakemake --cores all`.

Another profile: `snakemake --cores all --config profile=smoke`. Rules are in workflow/rules, one
file a stage; profiles and runs tables in workflow/config.
"""

import os
import shlex
import sys

from snakemake.settings.types import DeploymentMethod
from snakemake.utils import min_version

min_version("9.20")
sys.path[:0] = [workflow.basedir, f"{workflow.basedir}/workflow"]

from launch import launch_of
from pipeline import EXPECTED, Jobs, cache_settings, image_digest, load_profile, read_profile

from sparkgpt.errors import UserError

try:
    config = read_profile(config.get("profile", "cpu")) | config
    contained = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
    profile = load_profile({"profile": "cpu"} | config, contained)
    gpus = workflow.global_resources.get("gpu").value  # what `--resources gpu=N` names, or None
    LAUNCH = launch_of(config, contained, gpus)
    image = image_digest(config["image"], contained)
    JOBS = Jobs(profile, image)
except UserError as error:
    sys.exit(f"sparkgpt: error: {error}")

# The interpreter that runs Snakemake runs the rules, without being part of their text: moving the
# environment makes nothing stale. In a container it is the image's own, and each job must be in it.
# `record` ends each command: it notes by value what was made from what.
if contained:
    os.environ |= cache_settings(workflow.basedir) | os.environ
    # Whatever of the host's Python settings got in, as without --cleanenv, gets no further.
    place = f"unset PYTHONPATH PYTHONHOME PYTHONSTARTUP; export {EXPECTED}={image}"
else:
    place = f"PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"
shell.prefix(
    f"set -euo pipefail; {place}; STARTED=$EPOCHREALTIME; "
    'record() ( python -m sparkgpt.pipeline.record "$@" --started $STARTED ); '
)


container: config["image"]


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/autotune.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/report.smk"


# Seconds of work, or in need of a network: not worth a job of their own on a cluster.
localrules:
    fetch,
    verify,
    ready,
    compare,
    tables,
    plot,


rule all:
    default_target: True
    input:
        MANIFESTS.values(),
        CACHED_BYTES,
        results_of(MAIN),


# It is no job, and runs on the host.
SUMMARY = f"env -u {EXPECTED} {shlex.quote(sys.executable)} -m sparkgpt summary {RESULTS}"


onsuccess:
    shell(SUMMARY + " --log {log} || true")


onerror:
    shell(SUMMARY + " --log {log} || true")


# Further runs tables, each its own target: `snakemake --cores all sweep`.
for group in profile.groups:
    if group != MAIN:

        rule:
            name:
                group
            input:
                results_of(group),
