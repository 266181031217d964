"""A small HTTP server on 127.0.0.1 that misbehaves on request."""

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Plan:
    """How the server behaves, and what it was asked."""

    content: bytes = b""
    ranges: bool = True  # honour Range
    break_after: list[int] = field(default_factory=list)  # bytes sent before hanging up, in turn
    statuses: list[int] = field(default_factory=list)  # errors to answer first, in turn
    silent_seconds: float = 0.0  # before the body, while the connection stays open
    chunked: bool = False
    redirect: str = ""
    wrong_range: bool = False  # answer 206 with another start than asked for
    asked: list[tuple[str, dict]] = field(default_factory=list)  # (path, headers)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        plan: Plan = self.server.plan
        plan.asked.append((self.path, dict(self.headers)))
        if plan.statuses:
            return self.send_error(plan.statuses.pop(0))
        if plan.redirect:
            self.send_response(302)
            self.send_header("Location", plan.redirect)
            return self.end_headers()
        start = self._start(plan)
        if start is None:
            return
        body = plan.content[start:]
        self._end_headers(plan, body)
        time.sleep(plan.silent_seconds)
        limit = plan.break_after.pop(0) if plan.break_after else None
        self._send(plan, body[:limit], complete=limit is None)

    def _start(self, plan: Plan) -> int | None:
        asked = self.headers.get("Range")
        if not asked or not plan.ranges:
            self.send_response(200)
            return 0
        start, total = int(asked.removeprefix("bytes=").rstrip("-")), len(plan.content)
        if start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.send_response(206)
        start += plan.wrong_range
        self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        return start

    def _end_headers(self, plan: Plan, body: bytes):
        if plan.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()

    def _send(self, plan: Plan, body: bytes, complete: bool):
        try:
            if plan.chunked:
                self.wfile.write(b"%x\r\n" % (len(body) + (not complete)) + body)
                if complete:
                    self.wfile.write(b"\r\n0\r\n\r\n")
            else:
                self.wfile.write(body)
        except ConnectionError:
            pass  # the client gave up, as it should


def serve(plan: Plan) -> ThreadingHTTPServer:
    """Start a server on a free port of 127.0.0.1; `.url` is its address."""
    Handler.protocol_version = "HTTP/1.0"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan = plan
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    return server
