# The fastest kernels of this machine, as a record; on a CPU only among bit-identical ones.


rule autotune:
    output:
        choices=AUTOTUNE,
        job=f"{RESULTS}/jobs/autotune.json",
    log:
        f"{RESULTS}/logs/autotune.log",
    priority: 2  # training waits for it, and it for all cores
    threads: workflow.cores
    resources:
        **LAUNCH.gpu(1),
    params:
        values=values("autotune"),
        config=Unwatched(profile.autotune_flags),
    shell:
        "python -m sparkgpt autotune {params.config} --threads {threads} --out {output.choices}"
        " > {log} 2>&1"
        " && record {output.job} --values {params.values:q} --outputs {output}"


checkpoint ready:
    # All that training reads is in place. From here Snakemake decides again, and by content, what
    # is stale: what was rebuilt to the same bytes trains nothing anew. It is one checkpoint after
    # everything, because the jobs below one that reruns are looked at only after such a point.
    input:
        MANIFESTS.values(),
        AUTOTUNE,
    output:
        together=f"{RESULTS}/ready.txt",
        job=f"{RESULTS}/jobs/ready.json",
    log:
        f"{RESULTS}/logs/ready.log",
    params:
        values=values("ready"),
    shell:
        "cat {input} > {output.together} 2> {log}"
        " && record {output.job} --values {params.values:q} --outputs {output} --inputs {input}"
