# One job a run; it appears whole, and its checkpoints lie in a work folder of its own. Beside the
# runs, the check that their rates carry over to other widths.


rule train:
    # tee outlives a signal to the whole group, so that the trainer can say what it saved.
    input:
        train=ancient(MANIFESTS["train"]),
        val=ancient(MANIFESTS["val"]),
        content=ancient(CACHED_BYTES),
        ready=ancient(when_ready),
        autotune=ancient(AUTOTUNE),
    output:
        multiext("{records}/runs/{run}/", *RECORDS, "model_final.safetensors"),
        job="{records}/jobs/train-{run}.json",
    log:
        "{records}/logs/train-{run}.log",
    benchmark:
        "{records}/benchmarks/train-{run}.tsv"
    priority: 1  # before the exports and their checks, which fill the cores at the end
    retries: 2 if workflow.is_main_process else 0  # on a cluster, by a new job
    threads: LAUNCH.cores(workflow.cores, gpus)
    resources:
        **LAUNCH.resources,
        attempt=lambda wildcards, attempt: attempt,
    params:
        values=values("train"),
        config=lambda wildcards: Unwatched(profile.run_flags[wildcards.run]),
        expected=lambda wildcards: Unwatched(run_of(wildcards).raw["code"]),
        code=lambda wildcards: run_of(wildcards).values["code"],
        work=lambda wildcards: work_folder(RESULTS, run_of(wildcards).values),
        train=subpath(input.train, parent=True),
        val=subpath(input.val, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        LAUNCH.command
        + " {params.config} --run-name {wildcards.run} --resume --train-path {params.train}"
        " --val-path {params.val} --autotune {input.autotune} --threads "
        + LAUNCH.threads
        + " --out-dir {params.work}-t{threads} --publish {params.folder}"
        " --save-final --no-hf-export"
        " --expect-code {params.expected} --code-as {params.code}"
        " --attempt {resources.attempt} 2>&1 | (trap '' INT TERM; exec tee {log})"
        " && record {output.job} --values {params.values:q} --outputs {output}"


rule coordinates:
    # muP's coordinate check: activation sizes over width, on synthetic text.
    output:
        sizes="{records}/coordinates.json",
        job="{records}/jobs/coordinates.json",
    log:
        "{records}/logs/coordinates.log",
    threads: 1
    params:
        values=values("coordinates"),
    shell:
        "python -m sparkgpt coordinates --out {output.sizes} > {log} 2>&1"
        " && record {output.job} --values {params.values:q} --outputs {output}"
