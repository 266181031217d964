"""Command-line flags: the one parser, and those of `train` from the config dataclasses."""

import argparse
import dataclasses
import sys
from typing import Any, NoReturn

from sparkgpt.config import ModelConfig, TrainConfig, flag_name, from_values


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one and the help text doesn't say it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        empty = action.default in (None, "", (), [], False) or action.required
        told = f"({action.default}:" in text or "(default" in text
        return text if empty or told else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, `sparkgpt: error: ...`, with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"sparkgpt: error: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add one flag per field of a config dataclass that carries help text."""
    for item in dataclasses.fields(config):
        if "help" not in item.metadata:
            continue
        options = {"default": item.default, "help": item.metadata["help"]}
        if item.type in (bool, bool | None):
            options["action"] = argparse.BooleanOptionalAction
        elif item.type == tuple[int, ...]:
            options["type"] = _layer_list
            options["metavar"] = "LIST"
        else:
            options["type"] = item.type
            options["metavar"] = item.type.__name__.upper()
        if "choices" in item.metadata:
            options["choices"] = item.metadata["choices"]
            del options["metavar"]
        parser.add_argument(flag_name(item.name), **options)


def parse_train(argv: list[str], prog: str = "sparkgpt train") -> tuple[ModelConfig, TrainConfig]:
    """Parse the flags of `train`. Exits 2 on a wrong flag; UserError on impossible values."""
    parser = Parser(prog=prog, description="Train a model on whole byte documents.")
    add_flags(parser.add_argument_group("model"), ModelConfig)
    add_flags(parser.add_argument_group("run"), TrainConfig)
    values = vars(parser.parse_args(argv))
    return from_values(ModelConfig, values), from_values(TrainConfig, values)


def _layer_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_layer_list.__name__ = "comma-separated layers"  # argparse quotes it in its error
