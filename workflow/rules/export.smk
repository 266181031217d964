# A run as a stock directory, and that directory in the libraries that users have.


rule export:
    input:
        record="{records}/runs/{run}/run.json",
        weights=ancient("{records}/runs/{run}/model_final.safetensors"),
    output:
        multiext("{records}/runs/{run}/hf/", *HF_FILES),
    log:
        "{records}/logs/export-{run}.log",
    params:
        code=code("export"),
        env=ENVIRONMENT,
        run=subpath(input.record, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "python -m sparkgpt export {params.run} --out {params.folder} > {log} 2>&1"


rule check_hf:
    input:
        record="{records}/runs/{run}/run.json",
        config="{records}/runs/{run}/hf/config.json",
        others=multiext("{records}/runs/{run}/hf/", *HF_FILES[1:]),
        val=ancient(f"{RESULTS}/data/val.cache/manifest.json"),
    output:
        "{records}/runs/{run}/check_hf.json",
    log:
        "{records}/logs/check_hf-{run}.log",
    params:
        code=code("check"),
        env=ENVIRONMENT,
        library="transformers",
        run=subpath(input.record, parent=True),
        folder=subpath(input.config, parent=True),
        val=subpath(input.val, parent=True),
    shell:
        "python -m sparkgpt check-export {params.folder} --run {params.run}"
        " --library {params.library} --data {params.val} --out {output} > {log} 2>&1"


use rule check_hf as check_mlx with:
    output:
        "{records}/runs/{run}/check_mlx.json",
    log:
        "{records}/logs/check_mlx-{run}.log",
    params:
        code=code("check"),
        env=ENVIRONMENT,
        library="mlx",
        run=subpath(input.record, parent=True),
        folder=subpath(input.config, parent=True),
        val=subpath(input.val, parent=True),
