"""A finding: one line about the machine, and how lines become text."""

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARN, NO = "ok", "warn", "no"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Finding:
    """`level` is OK, WARN (works, worse than it could) or NO (something can't run);
    `advice` says what to do, and is empty where nothing is needed."""

    section: str
    level: str
    what: str
    detail: str
    advice: str = ""

    def line(self) -> str:
        """`level  what  detail -> advice`, one line."""
        advice = f" -> {self.advice}" if self.advice else ""
        text = f"{self.level:4}  {self.what:22}  {self.detail}{advice}"
        return " ".join(text.split("\n"))


def render(findings: Iterable[Finding]) -> str:
    """All lines, a heading above each section."""
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", f"{section}:"] if lines else [f"{section}:"]
        lines.append(finding.line())
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes for people: 1536 -> `1.5 KiB`."""
    for unit in UNITS:
        if abs(count) < 1024 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
