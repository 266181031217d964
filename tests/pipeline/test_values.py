"""Each key of a configuration against the rules whose values it changes, by docs/stages.md."""

import copy
import dataclasses
import shutil

import pytest
from test_fingerprint import table

from sparkgpt.fingerprint import ROOT
from sparkgpt.pipeline import values
from sparkgpt.pipeline.jobs import Jobs
from sparkgpt.pipeline.profiles import load_profile, read_profile

CONFIGURATION = table("Configuration")
# What each key is changed to; the others become one more.
OTHERS = {
    "image": "containers/other.sif", "sources.train.name": "https",
    "sources.train.flags.sha256": "0" * 64, "prepare.format": "jsonl", "train.device": "cuda",
    "train.attention-heads": 4, "train.kv-heads": 2, "train.head-dim": 64, "checks": ["mlx"],
    "plots": ["loss"], "compare": ["moe:dense"],
}  # fmt: skip


@pytest.fixture
def profile():
    return load_profile(read_profile("smoke") | {"profile": "smoke"})


def by_rule(profile):
    """Rule -> the values of its jobs, for those jobs that any of the profiles has."""
    return {job.name: (job.rule, job.raw) for job in Jobs(profile).of("runs")}


def changed_rules(before, after):
    return {rule for name, (rule, raw) in before.items() if after.get(name, (rule, raw))[1] != raw}


def keys_of(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")
        elif prefix + key not in ("profile", "sources.train.file"):
            yield prefix + key


def test_table_has_every_key():
    keys = set(keys_of(read_profile("smoke")))
    assert keys == {key for key in CONFIGURATION if not key.startswith("a row")}


@pytest.mark.parametrize("key", [key for key in CONFIGURATION if not key.startswith("a row")])
def test_key_changes_exactly_these_rules(key, profile):
    config = copy.deepcopy(dict(profile.values))
    *path, last = key.split(".")
    place = config
    for part in path:
        place = place[part]
    place[last] = OTHERS[key] if key in OTHERS else place[last] + 1
    after = load_profile(config)
    assert changed_rules(by_rule(profile), by_rule(after)) == CONFIGURATION[key]


@pytest.mark.parametrize(
    "key, change",
    [
        ("a row's `flags`", {"flags": "--num-experts 2"}),
        ("a row's `seeds`", {"seeds": (0, 1)}),
        ("a row's `label`", {}),
    ],
)
def test_row_changes_exactly_these_rules(key, change, profile):
    group = profile.groups["runs"]
    rows = (group.rows[0], dataclasses.replace(group.rows[1], **change))
    groups = {"runs": dataclasses.replace(group, rows=rows)}
    after = dataclasses.replace(profile, groups=groups)
    assert changed_rules(by_rule(profile), by_rule(after)) == CONFIGURATION[key]


def test_every_rule_has_a_shell_digest_and_its_own(tmp_path):
    before = values.shell_digests(ROOT)
    shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    texts = {path: path.read_text() for path in (tmp_path / "workflow/rules").glob("*.smk")}
    for rule, command in {"prepare": "sparkgpt prepare", "plot": "sparkgpt plots"}.items():
        for path, text in texts.items():
            path.write_text(text.replace(f"{command} ", f"{command}  "))
        values.shell_digests.cache_clear()
        after = values.shell_digests(tmp_path)
        assert {name for name in before if before[name] != after[name]} == {rule}
    values.shell_digests.cache_clear()


def test_environment_is_what_a_stage_imports():
    assert values.environment("fetch") == ""
    assert "torch==" in values.environment("train")
    assert "matplotlib==" in values.environment("plots")
    assert "matplotlib" not in values.environment("train")
    assert {"mlx-lm", "tokenizers", "transformers"} <= {
        pin.split("==")[0] for pin in values.environment("check").split(", ")
    }


def test_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert values.image_digest("containers/cpu.sif", contained=False) == "none"
    digest = f"sha256:{'1' * 64}"
    (tmp_path / "cpu.digest").write_text(f"{digest}\n")
    with pytest.raises(values.UserError, match="cpu.sif is not there; run containers/build cpu"):
        values.image_digest("cpu.sif", contained=True)
    (tmp_path / "cpu.sif").touch()
    assert values.image_digest("cpu.sif", contained=True) == digest
    with pytest.raises(values.UserError, match="gpu.digest is not there; run containers/build gpu"):
        values.image_digest("gpu.sif", contained=True)


@pytest.mark.parametrize("text", ["", "sha256:12", f"sha256:{'1' * 64}; touch PWNED #", "none"])
def test_what_is_no_digest(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu.sif").touch()
    (tmp_path / "cpu.digest").write_text(text)
    with pytest.raises(values.UserError, match="cpu.digest: .* is no digest of an image"):
        values.image_digest("cpu.sif", contained=True)
