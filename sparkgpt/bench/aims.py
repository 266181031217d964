"""What each figure should reach, in one place, and whether it does."""

import operator
from dataclasses import dataclass

SENSES = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Aim:
    """A figure of the record: its section, what it is, how it is printed, and its bound, if any."""

    section: str
    figure: str
    text: str
    form: str
    sense: str = ""
    bound: float = 0.0

    def verdict(self, value: float | None) -> str:
        """'met', 'not met', 'not measured', or '' without a bound. A NaN meets nothing."""
        if value is None:
            return "not measured"
        if not self.sense:
            return ""
        return "met" if SENSES[self.sense](value, self.bound) else "not met"

    def shown(self, value: float | None) -> str:
        return "-" if value is None else self.form.format(value)

    @property
    def target(self) -> str:
        return f"{self.sense} {self.form.format(self.bound)}" if self.sense else ""


TIMES, SHARE, RATE, SECONDS = "{:.2f}x", "{:.1%}", "{:,.0f}", "{:.3g} s"

AIMS = (
    Aim("step", "ours_tokens_per_second", "our step, window tokens/s", RATE),
    Aim("step", "masked_peer_tokens_per_second", "transformers, masked, window tokens/s", RATE),
    Aim("step", "unmasked_peer_tokens_per_second", "transformers, unmasked, tokens/s", RATE),
    Aim("step", "moe_tokens_per_second", "our MoE step, window tokens/s", RATE),
    Aim("step", "ratio_to_bare", "bare kernels' time / step's", TIMES, ">", 1.0),
    Aim("step", "ratio_to_unmasked_peer", "speed / unmasked transformers'", TIMES, ">=", 1.5),
    Aim("step", "ratio_to_masked_peer", "speed / masked transformers'", TIMES, ">=", 8.0),
    Aim("step", "moe_to_dense", "MoE's speed / dense", TIMES, ">=", 0.75),
    Aim("step", "share_gemm", "share of matrix products", SHARE),
    Aim("step", "share_attention", "share of attention", SHARE),
    Aim("step", "share_elementwise", "share of elementwise work", SHARE),
    Aim("step", "share_optimizer", "share of the optimizer", SHARE),
    Aim("step", "share_data", "share of data", SHARE),
    Aim("step", "share_other", "share of all else", SHARE),
    Aim("step", "peak_rss_ratio", "peak memory / its tensors, program off", TIMES, "<=", 1.3),
    Aim("step", "peak_rss_ratio_whole", "peak memory / its tensors", TIMES),
    Aim("data", "caching_mb_per_cpu_second", "caching, MB of JSONL a core second", RATE, ">=", 150),
    Aim("data", "planned_documents_per_second", "planning, documents/s", RATE, ">=", 2e6),
    Aim("data", "batch_milliseconds", "a batch of 49,152", "{:.2f} ms", "<", 1.0),
    Aim("data", "open_seconds", "opening a cache of 10 GB", SECONDS, "<", 0.2),
    Aim("data", "resume_seconds", "resuming at 10M documents", SECONDS, "<", 1.0),
    Aim("data", "packing_49152", "packing at 49,152", "{:.2%}", ">=", 0.999),
    Aim("data", "packing_8192", "packing at 8,192", "{:.2%}", ">=", 0.997),
    Aim("startup", "help_seconds", "sparkgpt --help", SECONDS, "<", 0.15),
    Aim("startup", "tables_check_seconds", "sparkgpt tables --check", SECONDS, "<", 1.0),
    Aim("startup", "snakemake_dry_run_seconds", "snakemake -n, profile cpu", SECONDS, "<", 3.0),
    Aim("startup", "first_step_seconds", "train's start to its first step", SECONDS, "<", 6.0),
)


def table(record: dict, sections: list[str]) -> str:
    """The figures of these sections as aligned columns: what, measured, aim, met or not."""
    rows = [("figure", "measured", "aim", "")]
    for aim in AIMS:
        if aim.section in sections:
            value = record.get(aim.figure)
            rows.append((aim.text, aim.shown(value), aim.target, aim.verdict(value)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{what:{widths[0]}}  {found:>{widths[1]}}  {aim:>{widths[2]}}  {verdict}".rstrip()
        for what, found, aim, verdict in rows
    ]
    return "\n".join([*lines, "", circumstances(record)])


def circumstances(record: dict) -> str:
    """One line: the machine, the threads, and how busy it was (load average of a minute)."""
    platform = record["machine"]["platform"]
    before, after = record["load_before"][0], record["load_after"][0]
    return (
        f"{platform['cpu']}, {platform['cores']} cores, {platform['threads']} threads; "
        f"load {before:.1f} before, {after:.1f} after"
    )
