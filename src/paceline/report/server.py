"""The server of `paceline watch`: live reports of run folders over HTTP.

The server is read-only and answers only GET and HEAD. Without a token, it answers only requests that name
a loopback host or its own address; with a token, every request needs the token. Pages load nothing from
other servers. `paceline train --watch` starts `python -m paceline.report.server FD RUN`, which serves on
the socket FD until the training ends.
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
from paceline.core.units import markup, plural
from paceline.core.untrusted import one_line
from paceline.report.html import document, joined, list_section
from paceline.report.live_run import LiveRun, run_folders
from paceline.report.outcome import Outcome, verdict
from paceline.report.run_page import efficiency_section, run_parts

LOOPBACK, PORT = "127.0.0.1", 8970
# The largest number of runs on one page.
MAX_RUNS = 64
# The minimum time between two reads of the folders, however many pages are open.
_REFRESH_S = 1.0
# After reading or rendering for t seconds, the server pauses for this multiple of t, so that the pages
# of long runs do not take a core from the training.
_REST = 8.0
# The largest number of connections. Each connection has a thread; further clients get an error.
_MAX_CLIENTS = 32
# Maximum time from the connection to the end of the answer.
_REQUEST_S = 30.0
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::\d*)?")
_COOKIE = "paceline_token"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Type": "text/plain; charset=utf-8",
    # A page sends a request every two seconds; an idle connection would occupy a thread.
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
    """The pages of all runs. A page is rendered once for all clients when its content changes.

    Each refresh searches folders of run folders for new runs. The number of a run is part of the address
    of its page and does not change.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self._given = given
        self.runs: list[LiveRun] = []
        self._left_out = 0
        # Counts changes of the list of runs; part of every version.
        self._changes = 0
        self._find()
        self._lock = threading.Lock()
        self._refreshed = self._rest_until = 0.0
        # Title, version and content by run number; None is the page of all runs.
        self._pages: dict[int | None, tuple[str, str, str]] = {}

    def page(self, number: int | None) -> tuple[str, str, str]:
        """Returns title, version number and HTML content of a page.

        Args:
            number: The number of the run, or None for the page of all runs.
        """
        with self._lock:
            self._refresh()
            shown = self.runs if number is None else [self.runs[number]]
            version = "-".join(str(n) for n in (self._changes, *(run.version for run in shown)))
            page = self._pages.get(number)
            if page is None or (page[1] != version and time.monotonic() >= self._rest_until):
                started = time.monotonic()
                if number is None:
                    title, parts = _all_runs(self.runs, self._left_out)
                else:
                    title, parts = _one_run(self.runs[number])
                    if len(self.runs) > 1:
                        parts.insert(0, '<p class="note"><a href="/">all runs</a></p>')
                page = self._pages[number] = (title, version, joined(parts))
                now = time.monotonic()
                self._rest_until = now + _REST * (now - started)
            return page

    def _find(self) -> None:
        """Adds the new runs in the watched folders.

        A folder without runs has a number, which its first run takes over.
        """
        folders = run_folders(self._given)
        known = {run.path for run in self.runs}
        new = [path for path in folders if path not in known]
        changed = False
        for number, run in enumerate(self.runs):
            child = next((path for path in new if path.parent == run.path), None)
            if child is not None and run.files is None and run.path not in folders:
                self.runs[number], changed = LiveRun(child), True
                new.remove(child)
        added = new[: MAX_RUNS - len(self.runs)]
        left_out = len(new) - len(added)
        if changed or added or left_out != self._left_out:
            self.runs += map(LiveRun, added)
            self._left_out = left_out
            self._changes += 1

    def _refresh(self) -> None:
        started = time.monotonic()
        if started - self._refreshed >= _REFRESH_S:
            self._find()
            for run in self.runs:
                run.refresh()
            now = time.monotonic()
            self._refreshed = now + _REST * (now - started)


def _one_run(run: LiveRun) -> tuple[str, list[str]]:
    """Returns the title and the HTML parts of a run's page."""
    if run.files is None:
        name = one_line(run.path.resolve().name)
        head = f"<header><p>{markup(name)}</p>\n<h1>Nothing to show</h1></header>"
        return name, [head, list_section("Problem", [run.problem])]
    return verdict(run.files), run_parts(run.files)


def _all_runs(runs: Sequence[LiveRun], left_out: int) -> tuple[str, list[str]]:
    """Returns the title and the HTML parts of the page of all runs, which links to each run."""
    title = plural(len(runs), "run")
    cards = []
    for number, run in enumerate(runs):
        if run.files is None:
            body = f'<p class="note">{markup(run.problem)}</p>'
        else:
            state = Outcome.of(run.files).state
            body = (
                f'<p><span class="state {state}">{state}</span>{markup(verdict(run.files))}</p>'
                f"{efficiency_section(run.files, heading=False)}"
            )
        link = f'<h2><a href="/run/{number}">{markup(one_line(str(run.path)))}</a></h2>'
        cards.append(f'<article class="card">{link}{body}</article>')
    more = f"{plural(left_out, 'more run')} not shown; name the runs to watch"
    return title, [
        f"<header><p>Paceline watch</p>\n<h1>{markup(title)}</h1></header>",
        f'<p class="note">{markup(more)}</p>' if left_out else "",
        f'<section class="runs">{"".join(cards)}</section>',
    ]


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
        page = path.removesuffix("/content").rstrip("/")
        if path == "/watch.js":
            self._send(HTTPStatus.OK, _script(), {"Content-Type": "text/javascript; charset=utf-8"})
        elif (number := self._run_number(page)) is not False:
            title, version, parts = self.server.content.page(number)
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
        """Returns the number of a page's run, None for the page of all runs, or False for no page.

        The first page shows all runs, or the only run.
        """
        runs = len(self.server.content.runs)
        if page == "":
            return None if runs > 1 else 0
        number = page.removeprefix("/run/")
        if page.startswith("/run/") and number.isascii() and number.isdigit() and len(number) < 6:
            return int(number) if int(number) < runs else False
        return False

    def _host_is_ours(self) -> bool:
        """Returns True if the `Host` header names this server, or if a token protects the server.

        Without a token, this check prevents DNS rebinding: the page of another site could otherwise reach
        this server by a name that resolves to the loopback address.
        """
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
        """Answers a request that http.server refuses; the answer has the same headers as every page."""
        status = HTTPStatus(code)
        self._send(status, f"{status.phrase.lower()}\n".encode())

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        sent = {**_HEADERS, "Content-Length": str(len(body)), **(headers or {})}
        if self.server.token and status == HTTPStatus.OK:
            # The first request has the token in its address; with the cookie, links need no token.
            sent["Set-Cookie"] = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self.send_response(status)
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Logs nothing: requests contain the token."""


class WatchServer(ThreadingHTTPServer):
    """An HTTP server of live reports.

    Args:
        runs: Run folders, and folders of run folders.
        listening: The socket on which the server listens.
        token: A secret that every request must contain; "" for no secret.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], listening: socket.socket, token: str = "") -> None:
        # The deadline of each open connection.
        self._deadlines: dict[Any, float] = {}
        self._lock = threading.Lock()
        self.host, port = listening.getsockname()[:2]
        super().__init__((self.host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.content = Content(runs)
        self.token = token

    @property
    def url(self) -> str:
        return url_of(self.socket, self.token)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._deadlines) >= _MAX_CLIENTS
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
        """Shuts down connections after their deadline, which ends the threads that read from them."""
        now = time.monotonic()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if now > deadline:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error in one line; ignores disconnected clients and time-outs."""
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
    """Opens a listening socket.

    Args:
        host: The host name or address to listen on.
        port: The port number; 0 chooses a free port.

    Raises:
        ConfigError: If the host or the port cannot be used.
    """
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
    """Returns the address of the server on a listening socket."""
    host, port = opened.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    return f"http://{shown}:{port}/" + (f"?token={quote(token)}" if token else "")


def _serve_for_training(descriptor: int, folder: Path) -> None:
    """Serves a run folder until standard input ends; the training holds that pipe open."""
    # Ctrl-C must stop only the training.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    server = WatchServer([folder], socket.socket(fileno=descriptor))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    _serve_for_training(int(sys.argv[1]), Path(sys.argv[2]))
