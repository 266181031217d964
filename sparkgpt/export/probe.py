"""How a library is asked: in a process of its own, through files in one folder.

questions.npz goes in, answer.json and logits.npz come out. A process of its own, because mlx lowers
the open-file limit, the libraries read their environment at import, and another version may live
under another interpreter. numpy and the standard library only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sparkgpt
from sparkgpt.errors import UserError
from sparkgpt.export.questions import Questions
from sparkgpt.progress import progress

Answer = tuple[dict[str, Any], list[np.ndarray]]

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ask(library: str, directory: Path, folder: Path, questions: Questions, python: str) -> Answer:
    """Have `library`, under the interpreter `python`, answer about a stock directory.

    Returns the answer's fields (with "error" when the library raised) and one float32
    (positions, 259) array of logits a document. UserError when the process itself failed.
    """
    questions.write(folder)
    source = str(Path(sparkgpt.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | OFFLINE | {"PYTHONPATH": os.pathsep.join(paths)}
    module = f"sparkgpt.export.probe_{library}"
    command = [python, "-m", module, str(directory.resolve()), str(folder)]
    try:
        # Our stdout is for the result alone: what a library prints goes to stderr.
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)
    except OSError as error:
        raise UserError(f"cannot run {python}: {error.strerror}; see --python") from error
    if process.returncode:
        raise UserError(
            f"asking {library} failed: `{python} -m {module}` ended with status "
            f"{process.returncode}; its own message is above",
            exit_code=1,
        )
    fields = json.loads((folder / "answer.json").read_text())
    arrays = np.load(folder / "logits.npz")
    return fields, [arrays[name] for name in arrays.files]


def run(version: str, answer: Callable[[str, Questions], Answer]) -> None:
    """The other side of `ask`: answer the questions in the folder that the command line names."""
    directory, folder = sys.argv[1], Path(sys.argv[2])
    try:
        fields, logits = answer(directory, Questions.read(folder))
    except Exception as error:  # whatever a library raises on a directory is a finding about it
        fields, logits = {"error": f"{type(error).__name__}: {error}"}, []
    np.savez(folder / "logits.npz", *logits)
    (folder / "answer.json").write_text(json.dumps({"version": version, **fields}))


def shown(documents: Sequence[bytes], library: str) -> Iterator[bytes]:
    """The documents one by one, with progress on stderr."""
    if documents:
        with progress(f"{library}: held-out documents", len(documents)) as bar:
            for document in documents:
                yield document
                bar.advance()
