# A run as a stock directory, and that directory in the libraries that users have.


rule export:
    input:
        record="{records}/runs/{run}/run.json",
        weights=ancient("{records}/runs/{run}/model_final.safetensors"),
    output:
        multiext("{records}/runs/{run}/hf/", *HF_FILES),
        job="{records}/jobs/export-{run}.json",
    log:
        "{records}/logs/export-{run}.log",
    params:
        values=values("export"),
        run=subpath(input.record, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "python -m sparkgpt export {params.run} --out {params.folder} > {log} 2>&1 && "
        + RECORD
        + " --inputs {input.record}"


rule check_hf:
    input:
        record="{records}/runs/{run}/run.json",
        config="{records}/runs/{run}/hf/config.json",
        others=multiext("{records}/runs/{run}/hf/", *HF_FILES[1:]),
        val=ancient(f"{RESULTS}/data/val.cache/manifest.json"),
    output:
        "{records}/runs/{run}/check_hf.json",
        job="{records}/jobs/check_hf-{run}.json",
    log:
        "{records}/logs/check_hf-{run}.log",
    params:
        values=values("check_hf"),
        library="transformers",
        run=subpath(input.record, parent=True),
        folder=subpath(input.config, parent=True),
        val=subpath(input.val, parent=True),
    shell:
        "python -m sparkgpt check-export {params.folder} --run {params.run}"
        " --library {params.library} --data {params.val} --out {output[0]} > {log} 2>&1 && "
        + RECORD
        + " --inputs {input.record} {input.config} {input.others}"


use rule check_hf as check_mlx with:
    output:
        "{records}/runs/{run}/check_mlx.json",
        job="{records}/jobs/check_mlx-{run}.json",
    log:
        "{records}/logs/check_mlx-{run}.log",
    params:
        values=values("check_mlx"),
        library="mlx",
        run=subpath(input.record, parent=True),
        folder=subpath(input.config, parent=True),
        val=subpath(input.val, parent=True),
