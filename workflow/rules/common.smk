# Names and values that several rules share.

from glob import glob

from pipeline import MAIN, Unwatched, flag_text, work_folder

RESULTS = profile.results
RECORDS = ("config.json", "metrics.jsonl", "summary.json", "run.json")
MANIFESTS = {split: f"{RESULTS}/data/{split}.cache/manifest.json" for split in ("train", "val")}
AUTOTUNE = f"{RESULTS}/autotune.json"
CACHED_BYTES = expand(
    f"{RESULTS}/data/{{split}}.cache/{{file}}",
    split=MANIFESTS,
    file=["bytes.bin", "offsets.bin"],
)
SOURCES = {source["file"]: source for source in config["sources"].values()}
PINS = {file: flag_text(source["flags"]) for file, source in SOURCES.items()}
HF_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
RULES = ["Snakefile", *sorted(glob("workflow/rules/*.smk"))]
CAPTIONS = sorted(glob("workflow/report/*.rst"))
GROUP_OF = {group.records: group for group in profile.groups.values()}


wildcard_constraints:
    raw="|".join(SOURCES),
    records="|".join(GROUP_OF),
    run="|".join(profile.run_flags),
    library="transformers|mlx",
    plot="[a-z]+",


def source_flags(wildcards, input):
    """The fetched files as flags of `sparkgpt prepare`."""
    return [f"{flag} {path}" for flag, path in zip(("--source", "--val-source"), input.raw)]


def when_ready(wildcards):
    """The file that says that all training inputs are made; reading it waits for them."""
    return checkpoints.ready.get().output[0]


def values(name):
    """The values of a rule's jobs, as a param."""

    def of(wildcards):
        if name == "train":
            when_ready(wildcards)
        return JOBS.job(name, **dict(wildcards.items())).lines

    return of


def run_of(wildcards):
    """A training job, once its data are there."""
    when_ready(wildcards)
    return JOBS.job("train", **dict(wildcards.items()))


def records_of(records, files=RECORDS):
    """The records of all runs of a group."""
    return expand(f"{records}/runs/{{run}}/{{file}}", run=GROUP_OF[records].runs, file=files)


def checks_of(records):
    """The results of the export checks; only the main group is exported."""
    names = {"transformers": "check_hf.json", "mlx": "check_mlx.json"}
    main = GROUP_OF[records].name == MAIN
    return records_of(records, [names[x] for x in config["checks"]]) if main else []


def comparison_of(records):
    """The comparison of a group's matched rows, if it has pairs."""
    return [f"{records}/compare.json"] if profile.pairs_of(records) else []


def shown(name, path, caption, category):
    """A file with its caption in the report of `snakemake --report`."""
    text = f"workflow/report/{caption}.rst"
    return report(path, caption=text, category=category, labels={"rows": name, "shows": caption})


def results_of(name):
    """Everything that a group of rows is run for; only the main group is exported."""
    records = profile.groups[name].records
    files = [job.record.as_posix() for job in JOBS.of(name)]
    files += records_of(records) + checks_of(records) + comparison_of(records)
    if checks_of(records):
        files += records_of(records, [f"hf/{file}" for file in HF_FILES])
    page = shown(name, f"{records}/index.html", "page", "Overview")
    plots = [
        shown(name, f"{records}/plots/{plot}.svg", plot, "Figures")
        for plot in profile.plots_of(records)
    ]
    return files + [f"{records}/tables.md", page] + plots
