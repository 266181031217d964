"""Downloads one file over HTTP, going on from where an earlier transfer broke.

While a transfer goes on, its bytes lie in `<name>.part`. The caller verifies the file and gives
it its name.
"""

import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sparkgpt.errors import FULL, UserError
from sparkgpt.progress import progress

BLOCK = 1 << 20
LONGEST_PAUSE = 30.0  # seconds between attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # worth another attempt
# Another attempt would fail in the same way: refused, no such host, bad certificate, bad address.
HOPELESS = (
    ConnectionRefusedError,
    socket.gaierror,
    ssl.SSLCertVerificationError,
    http.client.InvalidURL,
)


@dataclass(frozen=True)
class Patience:
    """timeout: seconds without a byte. attempts: how many in a row may bring nothing new.
    pause: seconds before the second attempt, doubled for each further one."""

    timeout: float = 60.0
    attempts: int = 5
    pause: float = 1.0


class BrokenTransfer(Exception):
    """The connection failed on the way; another attempt may go on from what arrived."""


def download(url: str, part: Path, token: str, patience: Patience) -> None:
    """Complete the file `part` from `url`, appending to what it already holds.

    token: sent as bearer, to the first host only; empty: none. Two processes must not do this at
    the same time (`sparkgpt.lock`). Raises UserError (exit code 1) when the transfer fails
    for good or the disk is full.
    """
    try:
        with open(part, "ab") as file:
            _attempts(Transfer(url, file, token, patience.timeout), patience, part.stem)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, part) from error


def disk_error(error: OSError, path: Path) -> UserError:
    """What to tell about a file that can't be written."""
    if error.errno in FULL:
        return UserError(
            f"no space left for {path} ({error.strerror}); make room and run the same command "
            "again, it goes on from what is there",
            exit_code=1,
        )
    return UserError(f"cannot write {path}: {error.strerror}; choose another --out")


@dataclass
class Transfer:
    """One file on its way: `file` is open for appending. timeout: seconds without a byte."""

    url: str
    file: BinaryIO
    token: str
    timeout: float

    def attempt(self, bar) -> None:
        """Ask for what is missing and append it. Raises BrokenTransfer or UserError."""
        offset = self.file.tell()
        try:
            response = self._open(offset)
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error, offset)
        with response:
            start, end = _extent(response)
            if start != offset:
                # The server ignores ranges and sends everything: start over.
                bar.advance(-offset)
                self._restart()
            if start not in (0, offset):
                raise BrokenTransfer(f"the server sent the file from byte {start}")
            self._copy(response, end, bar)
        if end is not None and self.file.tell() < end:
            raise BrokenTransfer(f"the transfer broke after {self.file.tell()} of {end} bytes")

    def _open(self, offset: int) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.url, headers={"User-Agent": "sparkgpt"})
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            return urllib.request.build_opener(SameHostToken).open(request, timeout=self.timeout)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from error

    def _copy(self, response: http.client.HTTPResponse, end: int | None, bar) -> None:
        bar.advance(0, "bytes" if end is None else f"of {end} bytes")
        while end is None or self.file.tell() < end:
            try:
                # read1 hands over what has arrived; read would lose it when the line breaks.
                block = response.read1(BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise self._failure(error) from error
            if not block:
                return
            self.file.write(block)
            bar.advance(len(block))

    def _refused(self, error: urllib.error.HTTPError, offset: int) -> None:
        """What an HTTP error means; returns when it means that the file is complete."""
        if error.code == 416 and offset:
            if error.headers.get("Content-Range", "") == f"bytes */{offset}":
                return
            self._restart()
            raise BrokenTransfer("the partial file does not fit the server's")
        # Not error.reason: urllib's own runs over several lines when redirects go in a circle.
        what = f"HTTP {error.code} {http.client.responses.get(error.code, '')}".rstrip()
        if error.code in BUSY:
            raise BrokenTransfer(what)
        remedy = "check the address and the revision"
        if error.code in (401, 403):
            remedy = "check the access rights; a hub token is read from HF_TOKEN"
        raise UserError(f"{self.url}: {what}; {remedy}", exit_code=1)

    def _failure(self, error: Exception) -> Exception:
        """A failed connection, as BrokenTransfer or, if hopeless, as UserError."""
        reason = getattr(error, "reason", error)
        if isinstance(reason, HOPELESS):
            what = f"{self.url}: {reason}; check the address and the network"
            return UserError(what, exit_code=1)
        if isinstance(reason, TimeoutError):
            return BrokenTransfer(f"no answer within {self.timeout:g} s")
        return BrokenTransfer(f"{reason or type(reason).__name__}")

    def _restart(self) -> None:
        self.file.truncate(0)
        self.file.seek(0)


class SameHostToken(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but shows the token to no other host, port or scheme."""

    def redirect_request(self, req, *details):
        new = super().redirect_request(req, *details)
        if new is not None and _origin(new.full_url) != _origin(req.full_url):
            new.remove_header("Authorization")
        return new


def _attempts(transfer: Transfer, patience: Patience, name: str) -> None:
    """Attempts until the file is complete; failures count only as long as nothing new arrives."""
    failures = 0
    with progress(f"fetch {name}") as bar:
        bar.advance(transfer.file.seek(0, os.SEEK_END))
        while True:
            before = transfer.file.tell()
            try:
                return transfer.attempt(bar)
            except BrokenTransfer as error:
                failures = 1 if transfer.file.tell() > before else failures + 1
                if failures >= patience.attempts:
                    raise UserError(
                        f"{transfer.url}: {error}; gave up after {failures} attempts, what "
                        "arrived is kept: run the same command again to go on",
                        exit_code=1,
                    ) from error
                bar.advance(0, f"bytes; {error}, trying again")
                time.sleep(min(patience.pause * 2 ** (failures - 1), LONGEST_PAUSE))


def _extent(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """First byte that the response carries and the file's full size (None: not told)."""
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if not found:
            raise BrokenTransfer("the server sent a part without saying which")
        return int(found[1]), int(found[2])
    length = response.headers.get("Content-Length")
    return 0, int(length) if length and length.isdigit() else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port
