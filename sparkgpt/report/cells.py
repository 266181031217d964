"""Markdown cells and tables. Every figure of a report is formatted here, alike in all."""

import difflib

NOT_MEASURED = "not measured"


def nats(value: float | None) -> str:
    """A loss in nats (or bits) per target, 4 decimals."""
    return NOT_MEASURED if value is None else f"{value:.4f}"


def signed(value: float | None) -> str:
    """A difference of losses, always with its sign, 4 decimals."""
    return NOT_MEASURED if value is None else f"{value:+.4f}"


def count(value: float | None) -> str:
    """A whole number with separators: parameters, tokens, tokens per second."""
    return NOT_MEASURED if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share (0 to 1) in per cent, 2 decimals."""
    return NOT_MEASURED if value is None else f"{100 * value:.2f} %"


def scientific(value: float | None) -> str:
    """A small positive number such as a largest difference, 2 digits."""
    return NOT_MEASURED if value is None else f"{value:.1e}"


def interval(bounds: list[float] | None) -> str:
    """A 95 % interval of differences; `none (n = 1)` when there is none."""
    return "none (n = 1)" if bounds is None else f"[{bounds[0]:+.4f}, {bounds[1]:+.4f}]"


def digest(value: str | None) -> str:
    """The first 12 hex digits of a digest, as code."""
    return "none" if not value else f"`{value.removeprefix('sha256:')[:12]}`"


def text(value: object) -> str:
    """Free text made safe inside a cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(header: list[str], rows: list[list[str]], numeric: int | None = None) -> str:
    """A Markdown table; columns from index `numeric` on are aligned to the right."""
    start = len(header) if numeric is None else numeric
    rule = ["---" if index < start else "---:" for index in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def short_diff(old: str, new: str, lines: int = 12) -> str:
    """The first `lines` changed lines between two texts, with + and -."""
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    changed = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    more = [f"... and {len(changed) - lines} more lines"] if len(changed) > lines else []
    return "\n".join(changed[:lines] + more)
