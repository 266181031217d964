# Matched runs, paired by seed.


rule compare:
    input:
        lambda wildcards: records_of(wildcards.records),
    output:
        "{records}/compare.json",
    log:
        "{records}/logs/compare.log",
    params:
        code=code("compare"),
        env=ENVIRONMENT,
        pairs=lambda wildcards: [f"--pair {pair}" for pair in profile.pairs_of(wildcards.records)],
    shell:
        "python -m sparkgpt compare --records {wildcards.records} {params.pairs}"
        " --out {output} > {log} 2>&1"
