"""The server of `paceline watch`: live reports of run folders over HTTP, and Prometheus' text.

It only reads, and answers GET and HEAD only. It listens on the loopback interface, where it answers
requests for that host alone; on any other address every request needs a token. Pages load nothing from
elsewhere. `python -m paceline.report.server FD RUN` serves for `paceline train --watch`: on a socket that
the training has opened, until the training ends.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from paceline.core.errors import ConfigError
from paceline.core.units import markup
from paceline.core.untrusted import one_line
from paceline.report.html import document, joined, list_section
from paceline.report.live_run import (
    CONTENT_TYPE,
    LiveRun,
    distinct_names,
    metrics_text,
    run_folders,
)
from paceline.report.outcome import verdict
from paceline.report.run_page import run_parts
from paceline.report.runs_page import overview

LOOPBACK, PORT = "127.0.0.1", 8970
# A folder of many runs would be a page that no browser shows at once.
MOST_RUNS = 64
# A folder is looked at no more often, however many pages are open.
_LOOK_S = 1.0
# After each look and each rendering of a page the server rests for so many times its length, so that the
# pages of long runs do not take a core from the training.
_REST = 8.0
# Open connections, each of which has a thread. Further clients get an error.
_MOST_CLIENTS = 32
# The time from the connection to the end of the answer, however fast the client sends and reads.
_REQUEST_S = 30.0
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::\d*)?")
_COOKIE = "paceline_token"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Type": "text/plain; charset=utf-8",
    # A page asks every two seconds; an idle connection would hold a thread.
    "Connection": "close",
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_BUSY = "".join(
    [
        "HTTP/1.1 503 Service Unavailable\r\n",
        *(f"{name}: {value}\r\n" for name, value in _HEADERS.items()),
        "\r\ntoo many clients\n",
    ]
).encode()


class Content:
    """What is shown of the runs. Rendered once for each version, for all clients together.

    `given` are run folders and folders of run folders. These are searched again with every look; a run
    keeps its number, which is its address.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self._given = given
        self.runs: list[LiveRun] = []
        self._names: list[str] = []
        self._left_out = 0
        # How often the list of runs has changed; a part of every version.
        self._changes = 0
        self._find()
        self._lock = threading.Lock()
        self._looked = self._rest_until = 0.0
        self._pages: dict[int, tuple[str, str, str]] = {}

    def page(self, number: int | None) -> tuple[str, str, str]:
        """Title, version and content of the overview (None) or of a run."""
        with self._lock:
            self._look()
            key = -1 if number is None else number
            shown = self.runs if number is None else [self.runs[number]]
            version = "-".join(
                str(number) for number in (self._changes, *(r.version for r in shown))
            )
            known = self._pages.get(key)
            if known is None or (known[1] != version and time.monotonic() >= self._rest_until):
                began = time.monotonic()
                title, parts = (
                    overview(self._names, self.runs, self._left_out)
                    if number is None
                    else _live_parts(shown[0])
                )
                if number is not None and len(self.runs) > 1:
                    parts.insert(0, '<p class="note"><a href="/">all runs</a></p>')
                known = (title, version, joined(parts))
                self._pages[key] = known
                now = time.monotonic()
                self._rest_until = now + _REST * (now - began)
            return known

    def metrics(self) -> str:
        with self._lock:
            self._look()
            named = zip(self._names, self.runs, strict=True)
            return metrics_text((name, run.files) for name, run in named)

    def _find(self) -> None:
        """Adds new runs at the end. The first one in a folder that had none takes its place."""
        found = run_folders(self._given)
        known = {run.path for run in self.runs}
        new = [path for path in found if path not in known]
        changed = False
        for number, run in enumerate(self.runs):
            inside = next((path for path in new if path.parent == run.path), None)
            if inside is not None and run.files is None and run.path not in found:
                self.runs[number], changed = LiveRun(inside), True
                new.remove(inside)
        added = new[: MOST_RUNS - len(self.runs)]
        left_out = len(new) - len(added)
        if changed or added or left_out != self._left_out:
            self.runs += map(LiveRun, added)
            self._left_out = left_out
            self._names = distinct_names([run.path for run in self.runs])
            self._changes += 1

    def _look(self) -> None:
        began = time.monotonic()
        if began - self._looked >= _LOOK_S:
            self._find()
            for run in self.runs:
                run.refresh()
            now = time.monotonic()
            self._looked = now + _REST * (now - began)


def _live_parts(run: LiveRun) -> tuple[str, list[str]]:
    if run.files is None:
        head = f"<header><p>{markup(run.name)}</p>\n<h1>Nothing to show</h1></header>"
        return run.name, [head, list_section("Problem", [run.problem])]
    return verdict(run.files), run_parts(run.files)


@cache
def _script() -> bytes:
    return Path(__file__).with_name("watch.js").read_bytes()


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "paceline", ""
    protocol_version = "HTTP/1.1"
    # A request line without a version gets headers, too.
    default_request_version = "HTTP/1.0"

    def do_GET(self) -> None:  # http.server's name
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=10)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"malformed address\n")
            return
        if not self._host_is_ours():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"unknown host\n")
        elif not self._may_read(query):
            text = b"give the token: ?token=... or the header Authorization: Bearer ...\n"
            self._send(HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})
        else:
            self._answer(address.path, query)

    do_HEAD = do_GET  # noqa: N815  (http.server's name)

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        content, page = self.server.content, path.removesuffix("/content").rstrip("/")
        if path == "/metrics":
            self._send(HTTPStatus.OK, content.metrics().encode(), {"Content-Type": CONTENT_TYPE})
        elif path == "/watch.js":
            self._send(HTTPStatus.OK, _script(), {"Content-Type": "text/javascript; charset=utf-8"})
        elif (number := self._run_number(page)) is not False:
            title, version, parts = content.page(number)
            headers = {"X-Version": version, "X-Title": quote(title)}
            if path.endswith("/content"):
                if query.get("have") == [version]:
                    self._send(HTTPStatus.NO_CONTENT, b"", headers)
                    return
                body = parts
            else:
                body = document(title, [parts], "/watch.js")
            headers["Content-Type"] = "text/html; charset=utf-8"
            self._send(HTTPStatus.OK, body.encode("utf-8", "replace"), headers)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n")

    def _run_number(self, page: str) -> int | bool | None:
        """A run's number, None for the overview, False where there is no such page. A single run is
        the first page."""
        runs = len(self.server.content.runs)
        if page == "":
            return None if runs > 1 else 0
        number = page.removeprefix("/run/")
        if page.startswith("/run/") and number.isascii() and number.isdigit() and len(number) < 6:
            return int(number) if int(number) < runs else False
        return False

    def _host_is_ours(self) -> bool:
        """Without a token, a page of another site must not reach this server by a name that it has
        pointed to the loopback address."""
        if self.server.token:
            return True
        named = _HOST.fullmatch(self.headers.get("Host", ""))
        host = (named[1] or named[2]).lower() if named else ""
        return host == self.server.host or is_loopback(host)

    def _may_read(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if not token:
            return True
        given = [
            *query.get("token", []),
            self.headers.get("Authorization", "").removeprefix("Bearer "),
        ]
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            given += [cookies[_COOKIE].value] if _COOKIE in cookies else []
        except CookieError:
            pass
        return any(hmac.compare_digest(text.encode(), token.encode()) for text in given)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that http.server refuses, with the headers of every page."""
        status = HTTPStatus(code)
        self._send(status, f"{status.phrase.lower()}\n".encode())

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        sent = {**_HEADERS, "Content-Length": str(len(body)), **(headers or {})}
        if self.server.token and status == HTTPStatus.OK:
            # From the address of the first request, so that links need no token.
            sent["Set-Cookie"] = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self.send_response(status)
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged: they hold the token."""


class WatchServer(ThreadingHTTPServer):
    """Serves `runs`, folders of runs among them, on the listening socket `opened`."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], opened: socket.socket, token: str = "") -> None:
        # The deadline of each open connection.
        self._deadlines: dict[Any, float] = {}
        self._lock = threading.Lock()
        self.host, port = opened.getsockname()[:2]
        super().__init__((self.host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = opened
        self.content = Content(runs)
        self.token = token

    @property
    def url(self) -> str:
        return url_of(self.socket, self.token)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._deadlines) >= _MOST_CLIENTS
            if not is_full:
                self._deadlines[request] = time.monotonic() + _REQUEST_S
        if is_full:
            request.setblocking(False)
            with suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends the connections whose time is over: their threads read the end of the stream."""
        now = time.monotonic()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if now > deadline:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no error; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            sys.stderr.write(
                f"paceline: note: watch: {type(error).__name__}: {one_line(str(error))}\n"
            )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. A ConfigError names the port where it cannot be had."""
    if not 0 <= port < 65536:
        raise ConfigError("--port", port, "must be 0 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        opened = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("--host", host, f"cannot be used: {error.strerror}") from None
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(64)
    except OSError as error:
        opened.close()
        field, value = ("--host", host) if error.errno == errno.EADDRNOTAVAIL else ("--port", port)
        raise ConfigError(
            field,
            value,
            f"cannot listen there: {error.strerror}",
            "choose another, or 0 for any free port",
        ) from None
    return opened


def url_of(opened: socket.socket, token: str = "") -> str:
    host, port = opened.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    return f"http://{shown}:{port}/" + (f"?token={quote(token)}" if token else "")


def _serve_for_training(descriptor: int, folder: Path) -> None:
    """Until standard input, which the training holds open, ends with it."""
    # Ctrl-C is meant for the training.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    server = WatchServer([folder], socket.socket(fileno=descriptor))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    _serve_for_training(int(sys.argv[1]), Path(sys.argv[2]))
