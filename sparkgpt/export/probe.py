"""How a library is asked: in a process of its own, through files in one folder.

questions.npz goes in, answer.json and logits.npz come out. A process of its own, because mlx lowers
the open-file limit, the libraries read their environment at import, and another version may live
under another interpreter. numpy and the standard library only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import sparkgpt
from sparkgpt.errors import UserError
from sparkgpt.export.questions import Answer, Questions

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ask(library: str, directory: Path, folder: Path, questions: Questions, python: str) -> Answer:
    """Have `library`, under the interpreter `python`, answer about a stock directory.

    `folder` is an empty one, for the files.
    Returns the answer's fields (with "error" when the library raised) and one float32
    (positions, 259) array of logits a document. UserError when the process itself failed.
    """
    questions.write(folder)
    # This package alone on the path: its parent may hold the libraries of *this* interpreter.
    (folder / "sparkgpt").symlink_to(Path(sparkgpt.__file__).parent)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | OFFLINE | {"PYTHONPATH": os.pathsep.join(paths)}
    arguments = [library, str(directory.resolve()), str(folder)]
    command = [python, "-m", "sparkgpt.export.probe", *arguments]
    try:
        # Our stdout is for the result alone: what a library prints goes to stderr.
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)
    except OSError as error:
        raise UserError(f"cannot run {python}: {error.strerror}; see --python") from error
    if process.returncode:
        raise UserError(
            f"asking {library} under {python} ended with status {process.returncode}; "
            "its own message is above",
            exit_code=1,
        )
    fields = json.loads((folder / "answer.json").read_text())
    arrays = np.load(folder / "logits.npz")
    return fields, [arrays[name] for name in arrays.files]


def main() -> None:
    """The other side of `ask`: `python -m sparkgpt.export.probe LIBRARY DIR FOLDER`."""
    library, directory, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if library == "mlx":
        from sparkgpt.export.probe_mlx import VERSION, answer
    else:
        from sparkgpt.export.probe_transformers import VERSION, answer
    try:
        fields, logits = answer(directory, Questions.read(folder))
    except Exception as error:  # whatever a library raises on a directory is a finding about it
        fields, logits = {"error": f"{type(error).__name__}: {error}"}, []
    np.savez(folder / "logits.npz", *logits)
    (folder / "answer.json").write_text(json.dumps({"version": VERSION, **fields}))


if __name__ == "__main__":
    main()
