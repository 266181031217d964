"""What a trace of system calls says about durability: what a crash could have taken away."""

import os
import re
from collections.abc import Iterator

STRACE = (
    "strace -f -y -s 0 --seccomp-bpf -e trace=open,openat,creat,write,writev,pwrite64,ftruncate,"
    "fallocate,copy_file_range,sendfile,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "rmdir,mkdir,mkdirat -o"
).split()  # then the trace's path, and the command

CALL = re.compile(r"(\w+)\((.*)\)\s+= (\d+)(?:<(.*)>)?")
NAME = re.compile(r'(?:<([^>]*)>, )?"([^"]*)"')


def calls(trace: str) -> Iterator[tuple[str, str, str]]:
    """(name, arguments, path of the file it opened) of each call that succeeded, as it ended."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        process, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            text = begun.pop(process) + resumed[1]
        if match := CALL.match(text):
            yield match[1], match[2], match[4] or ""


class Durability:
    """Follows a trace below `root`: what appeared there by rename, and what was risked.

    A name may appear only when the file, or the folder and all in it, was synced since it was last
    changed; and before anything else appears beside it or is removed there, its own folder must be
    synced. Names that begin with a dot are nobody's business. Checkpoints and the run's record also
    need the lines of metrics.jsonl that came before them.
    """

    def __init__(self, trace: str, root: str):
        self.root = root
        self.known: set[str] = set()
        self.dirty: set[str] = set()  # files written, and folders changed, since their last fsync
        self.pending: dict[str, str] = {}  # folder -> the name that appeared there last
        self.appeared: list[str] = []  # paths below root, in order
        self.faults: list[str] = []
        for name, arguments, opened in calls(trace):
            self._call(name, arguments, opened)
        self.faults += [f"{name} was left without a sync of its folder" for name in self._pending()]

    def _call(self, name: str, arguments: str, opened: str) -> None:
        if name in ("rename", "renameat", "renameat2"):
            source, target = (os.path.join(*found) for found in NAME.findall(arguments))
            self._rename(source, target)
        elif name in ("unlink", "unlinkat", "rmdir"):
            self._remove(os.path.join(*NAME.search(arguments).groups("")))
        elif name in ("mkdir", "mkdirat"):
            self._create(os.path.join(*NAME.search(arguments).groups("")))
        elif name in ("open", "openat", "creat"):
            if name == "creat" or "O_CREAT" in arguments or "O_TRUNC" in arguments:
                self._create(opened)
                self.dirty.add(opened)
        else:
            path = re.match(r"\d+<([^>]*)>", arguments)[1]
            if name in ("fsync", "fdatasync"):
                self.dirty.discard(path)
                self.pending.pop(path, None)
            else:
                self.dirty.add(path)

    def _create(self, path: str) -> None:
        if path not in self.known:
            self.known.add(path)
            self.dirty.add(os.path.dirname(path))

    def _rename(self, source: str, target: str) -> None:
        folder = os.path.dirname(target)
        if self._is_watched(target):
            for path in sorted(self.dirty):
                if path == source or path.startswith(source + "/"):
                    inside = os.path.relpath(path, source)
                    self._fault(f"{{}} appears before {inside} of it is synced", target)
            if folder in self.pending:
                self._fault(f"{{}} appears before {self.pending[folder]} is durable", target)
            lines = os.path.join(folder, "metrics.jsonl")
            if re.fullmatch(r"step\d+|run\.json", os.path.basename(target)) and lines in self.dirty:
                self._fault("{} appears before metrics.jsonl is synced", target)
            self.pending[folder] = os.path.basename(target)
            self.appeared.append(os.path.relpath(target, self.root))
        for paths in (self.known, self.dirty):
            moved = {p for p in paths if p == source or p.startswith(source + "/")}
            paths -= moved
            paths |= {target + p.removeprefix(source) for p in moved}
        self.dirty |= {folder, os.path.dirname(source)}

    def _remove(self, path: str) -> None:
        if self._is_watched(path):
            for folder, name in self.pending.items():
                if path.startswith(folder + "/"):
                    self._fault(f"{{}} is removed before {name} is durable", path)
        self.known.discard(path)
        self.dirty.discard(path)
        self.dirty.add(os.path.dirname(path))

    def _is_watched(self, path: str) -> bool:
        return path.startswith(self.root + "/") and not os.path.basename(path).startswith(".")

    def _fault(self, text: str, path: str) -> None:
        self.faults.append(text.format(os.path.relpath(path, self.root)))

    def _pending(self) -> list[str]:
        return [name for folder, name in self.pending.items() if folder.startswith(self.root)]
