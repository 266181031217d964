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
from pipeline import Jobs, image_digest, load_profile, read_profile

from sparkgpt.errors import UserError

try:
    config = read_profile(config.get("profile", "cpu")) | config
    profile = load_profile({"profile": "cpu"} | config)
    LAUNCH = launch_of(config)
    contained = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
    JOBS = Jobs(profile, image_digest(config["image"], contained))
except UserError as error:
    sys.exit(f"sparkgpt: error: {error}")

# The interpreter that runs Snakemake runs the rules, without being part of their text: moving the
# environment makes nothing stale.
shell.prefix(
    f"set -euo pipefail; STARTED=$EPOCHREALTIME; PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; "
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


onsuccess:
    shell("python -m sparkgpt summary {RESULTS} --log {log} || true")


onerror:
    shell("python -m sparkgpt summary {RESULTS} --log {log} || true")


# Further runs tables, each its own target: `snakemake --cores all sweep`.
for group in profile.groups:
    if group != MAIN:

        rule:
            name:
                group
            input:
                results_of(group),
