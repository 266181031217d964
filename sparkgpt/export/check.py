"""`sparkgpt check-export`: an exported directory in transformers and mlx_lm, against its run."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.files import write_json
from sparkgpt.flags import Parser

LIBRARIES = ("transformers", "mlx")


def both(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One object for several libraries: the worst of each value, and all of them in `results`."""
    differences = [result["max_logit_difference"] for result in results]
    first = results[0]
    merged = {key: first[key] for key in ("run", "tolerance", "final_val_loss")}
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        merged[keys] = sorted({key for result in results for key in result[keys]})
    return merged | {
        "library": "both",
        "version": {result["library"]: result["version"] for result in results},
        "max_logit_difference": None if None in differences else max(differences),
        "greedy_equal": all(result["greedy_equal"] for result in results),
        "tokenizer_round_trips": min(result["tokenizer_round_trips"] for result in results),
        "ok": all(result["ok"] for result in results),
        "results": results,
    }


def main(argv: list[str]) -> int:
    """`sparkgpt check-export`. UserError with exit code 1 when the check finds something."""
    args = _parser().parse_args(argv)
    from sparkgpt.export.judge import check

    directory, run = Path(args.directory), Path(args.run)
    libraries = LIBRARIES if args.library == "both" else [args.library]
    results = [check(directory, run, name, args.data, args.python) for name in libraries]
    result = both(results) if args.library == "both" else results[0]
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result))
    for item in results:
        if not item["ok"]:
            library = f"{item['library']} {item['version']}"
            raise UserError(f"{directory} in {library}: {'; '.join(item['failures'])}", exit_code=1)
        print(_line(directory, item), file=sys.stderr)
    return 0


def _line(directory: Path, result: dict[str, Any]) -> str:
    return (
        f"{directory} in {result['library']} {result['version']}: "
        f"logits within {result['max_logit_difference']:.2g}, {result['greedy_bytes']} greedy "
        f"bytes and {result['tokenizer_round_trips']} tokenizer round trips equal"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparkgpt check-export",
        description="Compare an exported directory, as the libraries load it, with its run.",
    )
    parser.add_argument("directory", metavar="DIR", help="exported directory")
    parser.add_argument("--run", required=True, metavar="RUN", help="the run that it came from")
    parser.add_argument(
        "--library", default="both", choices=(*LIBRARIES, "both"), help="which library loads it"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="the run's held-out documents: compare the loss too"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="interpreter that has the library"
    )
    parser.add_argument("--out", metavar="FILE", help="write the result to a file as well")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser
