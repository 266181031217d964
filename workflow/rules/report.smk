# Tables and plots from the records of a group; each plot is a job of its own.


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
