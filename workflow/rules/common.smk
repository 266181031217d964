# Names and values that several rules share.

from pipeline import MAIN, code, data_digests, environment, flag_text, work_folder

RESULTS = profile.results
ENVIRONMENT = environment()
RECORD = ("config.json", "metrics.jsonl", "summary.json", "run.json")
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


def data_of(wildcards):
    """Content digests of the training and held-out documents."""
    when_ready(wildcards)
    return data_digests(MANIFESTS.values())


def work_of(wildcards):
    """The work folder of a run's values: an interrupted run resumes there and nowhere else."""
    return work_folder(
        profile,
        code=code("train"),
        env=ENVIRONMENT,
        config=profile.run_flags[wildcards.run],
        data=data_of(wildcards),
        **LAUNCH.values,
    )


def records_of(records, files=RECORD):
    """The records of all runs of a group."""
    return expand(f"{records}/runs/{{run}}/{{file}}", run=GROUP_OF[records].runs, file=files)


def checks_of(records):
    """The results of the export checks; only the main group is exported."""
    names = {"transformers": "check_hf.json", "mlx": "check_mlx.json"}
    main = GROUP_OF[records].name == MAIN
    return records_of(records, [names[x] for x in config["checks"]]) if main else []


def comparison_of(records):
    """The comparison of the main group, if the profile has pairs."""
    return [f"{records}/compare.json"] if config["compare"] and records == RESULTS else []


def results_of(name):
    """Everything that a group of rows is run for; outside the main group, losses alone."""
    records = profile.groups[name].records
    files = records_of(records) + [f"{records}/tables.md"]
    if name != MAIN:
        return files + [f"{records}/plots/loss.svg"]
    plots = expand(f"{records}/plots/{{plot}}.svg", plot=config["plots"])
    exports = records_of(records, [f"hf/{file}" for file in HF_FILES]) if config["checks"] else []
    return files + exports + checks_of(records) + comparison_of(records) + plots
