# Matched runs, paired by seed.


rule compare:
    input:
        lambda wildcards: records_of(wildcards.records),
    output:
        "{records}/compare.json",
        job="{records}/jobs/compare.json",
    log:
        "{records}/logs/compare.log",
    params:
        values=values("compare"),
        pairs=lambda wildcards: [f"--pair {pair}" for pair in profile.pairs_of(wildcards.records)],
    shell:
        "python -m sparkgpt compare --records {wildcards.records} {params.pairs}"
        " --out {output[0]} > {log} 2>&1 && " + RECORD + " --inputs {input}"
