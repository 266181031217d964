"""The command line itself: light help, one line for every error, the right exit codes."""

import os
import subprocess
import sys

import pytest

from sparkgpt import __version__, cli
from sparkgpt.errors import UserError

HEAVY = ("torch", "matplotlib", "transformers")


def sparkgpt(*arguments, **options):
    command = [sys.executable, "-m", "sparkgpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def command(monkeypatch):
    """Make `sparkgpt broken` run the function given."""

    def install(function):
        module = type(sys)("broken")
        module.main = function
        monkeypatch.setitem(sys.modules, "broken", module)
        monkeypatch.setitem(cli.COMMANDS, "broken", ("broken", ""))

    return install


def raising(error):
    def main(argv):
        raise error

    return main


def test_help_lists_every_command():
    result = sparkgpt("--help")
    assert result.returncode == 0 and not result.stderr
    assert all(name in result.stdout for name in cli.COMMANDS)
    assert sparkgpt().stdout == result.stdout


def test_version():
    assert sparkgpt("--version").stdout == f"sparkgpt {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_is_light(name):
    program = (
        "import sys\n"
        "from sparkgpt.cli import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print(*(m for m in {HEAVY} if m in sys.modules), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"usage: sparkgpt {name}" in result.stdout
    assert result.stderr.strip() == ""


def test_top_help_imports_nothing_else():
    program = (
        "import sys\nfrom sparkgpt.cli import main\nmain(['--help'])\n"
        "print(*(m for m in sys.modules if m.startswith('sparkgpt')), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert set(result.stderr.split()) == {"sparkgpt", "sparkgpt.cli", "sparkgpt.errors"}


@pytest.mark.parametrize("wrong, advice", [("trian", "did you mean train?"), ("zzz", "--help")])
def test_unknown_command(wrong, advice, capsys):
    assert cli.main([wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparkgpt: error: ") and advice in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "error, code, text",
    [
        (UserError("what\nwhere"), 2, "what where"),
        (UserError("it failed", exit_code=1), 1, "it failed"),
        (OSError(28, "No space left on device", "/full/file"), 1, "/full/file: No space left"),
        (PermissionError(13, "Permission denied", "x"), 1, "x: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line(error, code, text, command, capsys):
    command(raising(error))
    assert cli.main(["broken"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith("sparkgpt: error: ") and text in printed
    assert printed.count("\n") == 1


def test_debug_shows_the_traceback(command):
    command(raising(UserError("what")))
    with pytest.raises(UserError):
        cli.main(["broken", "--debug"])


def test_a_mistake_of_ours_is_not_hidden(command):
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["broken"])


def test_reader_that_has_left():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-m", "sparkgpt", "--help"]
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert result.stderr == ""
    assert result.returncode == 141
