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
    log:
        "{records}/logs/tables.log",
    params:
        code=code("tables"),
        env=ENVIRONMENT,
    shell:
        "python -m sparkgpt tables --records {wildcards.records} --rows {input.rows}"
        " --out {output.markdown} --json-out {output.json} > {log} 2>&1"


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
    log:
        "{records}/logs/plot-{plot}.log",
    params:
        code=code("plots"),
        env=ENVIRONMENT,
        folder=subpath(output[0], parent=True),
    shell:
        "python -m sparkgpt plots --records {wildcards.records} --rows {input.rows}"
        " --only {wildcards.plot} --out {params.folder} > {log} 2>&1"


rule rulegraph:
    # The picture of the rules, from Snakemake's own graph of them.
    input:
        RULES,
        ancient(f"{RESULTS}/ready.txt"),
    output:
        f"{RESULTS}/rulegraph.svg",
    log:
        f"{RESULTS}/logs/rulegraph.log",
    params:
        code=code("graph"),
        env=ENVIRONMENT,
        config=[f"{key}={config[key]}" for key in ("checks", "plots", "compare")],
        profile=profile.name,
    shell:
        "python -m snakemake --rulegraph --cores 1 --config profile={params.profile} 2> {log}"
        " | python -m sparkgpt graph --out {output} 2>> {log}"


rule page:
    input:
        records=lambda wildcards: records_of(wildcards.records),
        checks=lambda wildcards: checks_of(wildcards.records),
        comparison=lambda wildcards: comparison_of(wildcards.records),
        plots=lambda wildcards: expand(
            f"{wildcards.records}/plots/{{plot}}.svg", plot=plots_of(wildcards.records)
        ),
        rows=lambda wildcards: GROUP_OF[wildcards.records].table,
        graph=rules.rulegraph.output,
        captions=CAPTIONS,
    output:
        "{records}/index.html",
    log:
        "{records}/logs/page.log",
    params:
        code=code("report"),
        env=ENVIRONMENT,
    shell:
        "python -m sparkgpt report --records {wildcards.records} --rows {input.rows}"
        " --graph {input.graph} --captions workflow/report --out {output} > {log} 2>&1"
