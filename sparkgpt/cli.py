"""The command line: chooses a subcommand, imports it only then, and turns errors into one line.

No number lives here, so that an edit to this file makes no result stale.
"""

import difflib
import importlib
import os
import sys

from sparkgpt import __version__
from sparkgpt.errors import UserError, explain

# Subcommand -> (module whose main(argv) it is, what it does).
COMMANDS = {
    "fetch": ("sparkgpt.data.sources", "download a pinned source and verify it"),
    "prepare": ("sparkgpt.data.prepare", "raw source to training and held-out documents"),
    "cache": ("sparkgpt.data.cache", "documents to memory-mapped bytes, or their statistics"),
    "doctor": ("sparkgpt.doctor.command", "what this machine can run, why not, what to do"),
    "autotune": ("sparkgpt.autotune", "choose the fastest kernels of this machine"),
    "kernels": ("sparkgpt.kernels", "compile every Triton kernel without a GPU: memory, spills"),
    "bench": ("sparkgpt.bench.command", "speed of a step, of data and of starts, against aims"),
    "coordinates": ("sparkgpt.coordinates", "muP's coordinate check, dense and MoE, as a record"),
    "train": ("sparkgpt.train.__main__", "train a model"),
    "eval": ("sparkgpt.evaluate", "loss of a run or an export on whole documents"),
    "generate": ("sparkgpt.generate", "continue a text"),
    "export": ("sparkgpt.export.hf", "a run as a stock Hugging Face directory"),
    "check-export": ("sparkgpt.export.check", "load an export elsewhere and compare it with ours"),
    "compare": ("sparkgpt.report.compare", "matched runs, paired by seed"),
    "tables": ("sparkgpt.report.tables", "render tables from records, or keep the README's"),
    "plots": ("sparkgpt.report.plots", "draw plots from records"),
    "report": ("sparkgpt.report.page", "one page of all tables and figures of a records folder"),
    "graph": ("sparkgpt.report.graph", "draw the rules of the pipeline from Snakemake's graph"),
    "summary": ("sparkgpt.report.summary", "what a start of the pipeline ran, reused and made"),
    "archive": ("sparkgpt.report.archive", "publish records, tables and plots as a version"),
    "why": ("sparkgpt.pipeline.why", "which jobs are stale, what changed, and what it costs"),
    "accept": ("sparkgpt.pipeline.accept", "adopt a change that alters no result"),
    "trace": ("sparkgpt.pipeline.trace", "a table's row to its records, tree, code and data"),
    "clean": ("sparkgpt.pipeline.clean", "list or remove work folders that no run will resume"),
    "verify": ("sparkgpt.pipeline.verify", "files, records, data and tables against each other"),
    "reproduced": ("sparkgpt.report.reproduced", "published against reproduced, row by row"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code and prints any error as one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))
    debug = "--debug" in argv
    try:
        code = _run([word for word in argv if word != "--debug"])
        sys.stdout.flush()  # here, where a reader that has left can still be handled
        return code
    except BrokenPipeError:
        # The reader has left; a second failure while flushing at exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError, KeyboardInterrupt) as error:
        if debug:
            raise
        message, code = explain(error)
        print(f"sparkgpt: error: {message}", file=sys.stderr)
        return code


def usage() -> str:
    """The text of `sparkgpt --help`."""
    lines = ["usage: sparkgpt [--version] [--debug] COMMAND ...", "", "commands:"]
    lines += [f"  {name:13} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "`sparkgpt COMMAND --help` tells its flags; --debug shows tracebacks."]
    return "\n".join(lines)


def _run(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"sparkgpt {__version__}")
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else "see `sparkgpt --help`"
        raise UserError(f"there is no command {command!r}; {advice}")
    if command != "doctor":  # which says what is wrong with an image, beside all else
        from sparkgpt.image import check_image

        check_image()
    return importlib.import_module(COMMANDS[command][0]).main(argv[1:]) or 0
