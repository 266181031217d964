# Tables, plots and a page from the records of a group; each plot is a job of its own.


rule tables:
    input:
        records=lambda wildcards: records_of(wildcards.records),
        checks=lambda wildcards: checks_of(wildcards.records),
        comparison=lambda wildcards: comparison_of(wildcards.records),
        rows=lambda wildcards: GROUP_OF[wildcards.records].table,
    output:
        markdown="{records}/tables.md",
        json="{records}/tables.json",
        job="{records}/jobs/tables.json",
    log:
        "{records}/logs/tables.log",
    params:
        values=values("tables"),
    shell:
        "python -m sparkgpt tables --records {wildcards.records} --rows {input.rows}"
        " --out {output.markdown} --json-out {output.json} > {log} 2>&1 && "
        + RECORD
        + " --inputs {input}"


rule plot:
    input:
        records=lambda wildcards: records_of(wildcards.records),
        comparison=lambda wildcards: comparison_of(wildcards.records),
        coordinates=branch(
            lambda wildcards: wildcards.plot == "coordinates", "{records}/coordinates.json", []
        ),
        rows=lambda wildcards: GROUP_OF[wildcards.records].table,
    output:
        "{records}/plots/{plot}.svg",
        job="{records}/jobs/plot-{plot}.json",
    log:
        "{records}/logs/plot-{plot}.log",
    params:
        values=values("plot"),
        folder=subpath(output[0], parent=True),
    shell:
        "python -m sparkgpt plots --records {wildcards.records} --rows {input.rows}"
        " --only {wildcards.plot} --out {params.folder} > {log} 2>&1 && "
        + RECORD
        + " --inputs {input}"


rule rulegraph:
    # The picture of the rules, from Snakemake's own graph of them.
    input:
        rules=RULES,
        ready=ancient(f"{RESULTS}/ready.txt"),
    output:
        f"{RESULTS}/rulegraph.svg",
        job=f"{RESULTS}/jobs/rulegraph.json",
    log:
        f"{RESULTS}/logs/rulegraph.log",
    params:
        values=values("rulegraph"),
        profile=profile.name,
    shell:
        "python -m snakemake --rulegraph --cores 1 --config profile={params.profile} 2> {log}"
        " | python -m sparkgpt graph --out {output[0]} 2>> {log} && "
        + RECORD
        + " --inputs {input.rules}"


rule page:
    input:
        records=lambda wildcards: records_of(wildcards.records),
        checks=lambda wildcards: checks_of(wildcards.records),
        comparison=lambda wildcards: comparison_of(wildcards.records),
        plots=lambda wildcards: expand(
            f"{wildcards.records}/plots/{{plot}}.svg", plot=profile.plots_of(wildcards.records)
        ),
        rows=lambda wildcards: GROUP_OF[wildcards.records].table,
        graph=rules.rulegraph.output[0],
        captions=CAPTIONS,
    output:
        "{records}/index.html",
        job="{records}/jobs/page.json",
    log:
        "{records}/logs/page.log",
    params:
        values=values("page"),
    shell:
        "python -m sparkgpt report --records {wildcards.records} --rows {input.rows}"
        " --graph {input.graph} --captions workflow/report --out {output[0]} > {log} 2>&1 && "
        + RECORD
        + " --inputs {input}"
