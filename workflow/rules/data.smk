# fetch -> verify -> prepare -> cache


rule fetch:
    # No code here: the pinned sha256 fixes the bytes, so an edit must not download them again.
    output:
        f"{RESULTS}/raw/{{raw}}",
        job=f"{RESULTS}/jobs/fetch-{{raw}}.json",
    log:
        f"{RESULTS}/logs/fetch-{{raw}}.log",
    params:
        values=values("fetch"),
        name=lambda wildcards: SOURCES[wildcards.raw]["name"],
        pin=lambda wildcards: PINS[wildcards.raw],
        folder=subpath(output[0], parent=True),
    shell:
        "python -m sparkgpt fetch {params.name} --out {params.folder} {params.pin}"
        " > {log} 2>&1 && " + RECORD


rule verify:
    input:
        raw=f"{RESULTS}/raw/{{raw}}",
    output:
        f"{RESULTS}/raw/{{raw}}.verified.json",
        job=f"{RESULTS}/jobs/verify-{{raw}}.json",
    log:
        f"{RESULTS}/logs/verify-{{raw}}.log",
    params:
        values=values("verify"),
        name=lambda wildcards: SOURCES[wildcards.raw]["name"],
        pin=lambda wildcards: PINS[wildcards.raw],
        folder=subpath(input.raw, parent=True),
    shell:
        "python -m sparkgpt fetch {params.name} --out {params.folder} {params.pin}"
        " --verify --json > {output[0]} 2> {log} && " + RECORD + " --inputs {input}"


rule prepare:
    input:
        raw=expand(f"{RESULTS}/raw/{{raw}}", raw=SOURCES),
        verified=expand(rules.verify.output[0], raw=SOURCES),
    output:
        train=f"{RESULTS}/data/train.jsonl",
        val=f"{RESULTS}/data/val.jsonl",
        manifest=f"{RESULTS}/data/manifest.json",
        job=f"{RESULTS}/jobs/prepare.json",
    log:
        f"{RESULTS}/logs/prepare.log",
    benchmark:
        f"{RESULTS}/benchmarks/prepare.tsv"
    params:
        values=values("prepare"),
        sources=source_flags,
        config=flag_text(config["prepare"]),
        folder=subpath(output.train, parent=True),
    shell:
        "python -m sparkgpt prepare {params.sources} {params.config} --out {params.folder}"
        " > {log} 2>&1 && " + RECORD + " --inputs {input}"


rule cache:
    input:
        train=rules.prepare.output.train,
        val=rules.prepare.output.val,
    output:
        train=MANIFESTS["train"],
        val=MANIFESTS["val"],
        content=CACHED_BYTES,
        job=f"{RESULTS}/jobs/cache.json",
    log:
        f"{RESULTS}/logs/cache.log",
    benchmark:
        f"{RESULTS}/benchmarks/cache.tsv"
    params:
        values=values("cache"),
        train=subpath(output.train, parent=True),
        val=subpath(output.val, parent=True),
    shell:
        "(python -m sparkgpt cache {input.train} --out {params.train}"
        " && python -m sparkgpt cache {input.val} --out {params.val}) > {log} 2>&1 && "
        + RECORD
        + " --inputs {input}"
