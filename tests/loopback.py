"""An HTTP server on 127.0.0.1 whose paths behave well or badly, each as its ``Answer`` says."""

import contextlib
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

WEB_PAGE = (
    b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head>"
    b"<body>Please sign in.</body></html>\n"
)


@dataclass
class Answer:
    """What a path answers.

    It misbehaves (status, not_http, drop_at, stall_at) for the first ``times`` GETs; None: for
    ever.
    """

    body: bytes = b""
    status: int = 200
    not_http: bytes = b""  # sent in place of an HTTP answer
    times: int | None = None
    ranges: bool = True  # honours Range; otherwise sends everything, with 200
    # closes the connection after this byte of the body; of several, each GET has its turn
    drop_at: int | tuple[int, ...] | None = None
    stall_at: int | None = (
        None  # sends nothing after this byte of the body, until the server is closed
    )


class Loopback:
    """The server.

    ``answers`` maps a decoded path to an ``Answer``, ``requests`` are (path, Range header).
    """

    def __init__(self):
        self.answers, self.requests, self.closing = {}, [], threading.Event()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"loopback": self})
        )
        self._server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._server.server_port}"

    def url(self, path):
        return f"{self.base}/{quote(path)}"

    def gets(self, path):
        """The Range headers (None for a whole file) of the requests for ``path``."""
        return [wanted for asked, wanted in self.requests if asked == f"/{path}"]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    loopback: Loopback

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, wanted = unquote(self.path), self.headers.get("Range")
        self.loopback.requests.append((path, wanted))
        answer = self.loopback.answers.get(path, Answer(status=404))
        bad = answer.times is None or len(self.loopback.gets(path[1:])) <= answer.times
        if answer.status != 200 and bad:
            return self.send_error(answer.status)
        if answer.not_http and bad:
            self.wfile.write(answer.not_http)
            return
        start, size = (
            int(wanted[len("bytes=") : -1]) if wanted and answer.ranges else 0,
            len(answer.body),
        )
        if start and start >= size:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        drop_at = answer.drop_at
        if isinstance(drop_at, tuple):
            drop_at = drop_at[len(self.loopback.gets(path[1:])) % len(drop_at)]
        limits = [limit for limit in (drop_at, answer.stall_at) if limit is not None and bad]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(answer.body[start : min(limits, default=None)])
            if answer.stall_at is not None and bad:
                self.loopback.closing.wait()
