# The fastest kernels of this machine, as a record; on a CPU only among bit-identical ones.


rule autotune:
    output:
        f"{RESULTS}/autotune.json",
    log:
        f"{RESULTS}/logs/autotune.log",
    threads: workflow.cores
    params:
        code=code("autotune"),
        env=ENVIRONMENT,
        config=profile.autotune_flags,
    shell:
        "python -m sparkgpt autotune {params.config} --threads {threads} --out {output}"
        " > {log} 2>&1"
