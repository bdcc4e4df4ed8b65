"""The server of live reports: pages that are renewed, several runs, who may read, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.core.events import CheckpointEvent, MetricEvent, NoteEvent
from paceline.report import server as module
from paceline.report.server import WatchServer, open_socket
from refusals import refused
from report.conftest import MakeRun
from report.made_up_runs import append, evaluation, finished_events, served, start, step

TOKEN = "0123456789abcdef"
HOSTILE = "<img src=x onerror=alert(1)>\"'&"


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFRESH_S", 0.0)
    monkeypatch.setattr(module, "_REST", 0.0)


class Client:
    """Asks a server as a browser does."""

    def __init__(self, server: WatchServer) -> None:
        self._port = server.socket.getsockname()[1]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=100)

    def send(self, request: bytes) -> bytes:
        """The whole answer to what need not be a request."""
        answer = b""
        with self.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(request)
            while more := connection.recv(65536):
                answer += more
        return answer

    def get(
        self, path: str = "/", method: str = "GET", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=100)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return found


@contextlib.contextmanager
def serving(runs: Sequence[Path], token: str = "") -> Iterator[Client]:
    with served(runs, token) as server:
        yield Client(server)


def test_a_page_is_renewed_without_a_reload(make_run: MakeRun) -> None:
    folder = make_run(finished_events()[:100])
    with serving([folder]) as client:
        status, page, headers = client.get("/")
        assert status == 200
        assert '<script src="/watch.js" defer></script>' in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, content, headers = client.get("/content?have=")
        assert (status, content in page) == (200, True)
        version = headers["X-Version"]
        assert client.get(f"/content?have={version}")[:2] == (204, "")
        append(folder, NoteEvent("a new note"), evaluation(99, 77.77))
        append(folder, MetricEvent(98, {"gap": 1.5}), MetricEvent(99, {"gap": 0.25}))
        append(folder, CheckpointEvent(99, "checkpoints/step-00000099.pt", 1.0, stall_s=0.01))
        status, content, headers = client.get(f"/content?have={version}")
        assert status == 200
        assert headers["X-Version"] != version
        for part in ("a new note", "77.77 %", "step-00000099.pt", "10 ms", "T = S · N · e"):
            assert part in content
        assert "Logged metrics" in content
        assert "innerHTML" in client.get("/watch.js")[1]
        assert client.get("/", "HEAD")[:2] == (200, "")


def test_several_runs_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run(finished_events(), name="one"), make_run([start(), step(1)], name=HOSTILE),
        tmp_path / "not-there",
    ]  # fmt: skip
    with serving(runs) as client:
        status, page, _ = client.get("/")
        assert status == 200
        assert page.count("<article") == 3
        assert "does not exist" in page
        assert "<img" not in page
        assert "&lt;img" in page
        assert "all runs" in client.get("/run/0")[1]
        assert "&lt;img" in client.get("/run/1")[1]
        assert "Nothing to show" in client.get("/run/2")[1]


NOWHERE = [
    "/run/7", "/run/-1", "/run/%D9%A3", "/run/0/../../etc/passwd", "/../metrics.jsonl",
    "/run/99999999999", "/x",
]  # fmt: skip


def test_there_is_nothing_else_and_it_is_read_only(make_run: MakeRun) -> None:
    folder = make_run([start()])
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    with serving([folder]) as client:
        for path in NOWHERE:
            assert client.get(path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.get("/", method)[0] == 501
        client.get("/")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before


def test_another_host_name_is_refused_on_loopback(make_run: MakeRun) -> None:
    with serving([make_run([start()])]) as client:
        assert client.get("/", Host="rebound.example.com")[0] == 421
        for host in ("[::1", "::1]", "evil@localhost", "[::2]:80", "localhost/x", ""):
            assert client.get("/", Host=host)[0] == 421
        for host in ("localhost:1234", "LOCALHOST", "127.0.0.1", "[::1]:80", "[::1]"):
            assert client.get("/", Host=host)[0] == 200


MALFORMED = {
    "no version": (b"GET /\r\n\r\n", 421),
    "no path": (b"GET\r\n\r\n", 400),
    "other version": (b"GET / HTTP/9.9\r\n\r\n", 505),
    "other method": (b"BREW / HTTP/1.1\r\n\r\n", 501),
    "many fields": (b"GET /?" + b"a=1&" * 11 + b" HTTP/1.1\r\n\r\n", 400),
    "bad host in the address": (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
    "long address": (b"GET /" + b"a" * 65_532, 414),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
}


@pytest.mark.parametrize(("request_", "status"), MALFORMED.values(), ids=MALFORMED)
def test_every_answer_has_the_headers_of_a_page(
    make_run: MakeRun, request_: bytes, status: int
) -> None:
    with serving([make_run([start()])]) as client:
        head, _, body = client.send(request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    for name in (
        b"Content-Security-Policy: default-src 'none'",
        b"X-Content-Type-Options: nosniff",
    ):
        assert name in head
    assert b"<" not in body


def test_clients_are_limited_in_number_and_in_time(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CLIENTS", 3)
    with serving([make_run([start()])]) as client, contextlib.ExitStack() as stack:
        threads = threading.active_count()
        slow = [stack.enter_context(client.connect()) for _ in range(3)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        assert client.get("/")[0] == 503
        assert b"Content-Security-Policy" in client.send(b"")
        assert threading.active_count() <= threads + 3
        # Requests that begin now have no time; the earlier ones keep theirs.
        slow[0].close()
        monkeypatch.setattr(module, "_REQUEST_S", 0.0)
        # Until the server sees that the first one has left.
        while (answer := client.send(b"GET / HTTP/1.1\r\n")).startswith(b"HTTP/1.1 503"):
            continue
        assert answer == b"", "ended by the server"


def test_a_token_is_needed_where_there_is_one(make_run: MakeRun) -> None:
    with serving([make_run([start()])], TOKEN) as client:
        for path in ("/", "/content", "/watch.js", f"/?token={TOKEN[:-1]}", "/?token="):
            assert client.get(path)[0] == 401
        assert (
            client.get("/", Authorization="Bearer wrong", Cookie="paceline_token=x; =;")[0] == 401
        )
        status, page, headers = client.get(f"/?token={TOKEN}", Host="node7:8970")
        assert status == 200
        assert TOKEN not in page
        assert "HttpOnly" in headers["Set-Cookie"]
        assert client.get("/content", Cookie=headers["Set-Cookie"].split(";")[0])[0] == 200
        assert client.get("/content", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_port_in_use_and_an_address_of_another_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host, number, field in (
            ("127.0.0.1", port, "--port"), ("192.0.2.1", 0, "--host"),
            ("127.0.0.1", 70_000, "--port"), ("no such host.invalid", 0, "--host"),
        ):  # fmt: skip
            with refused(field):
                open_socket(host, number)


def test_runs_that_begin_later_appear_and_keep_their_addresses(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, other = tmp_path / "later", make_run([start()], name="b")
    with serving([later, other]) as client:
        _, page, headers = client.get("/")
        assert page.count("<article") == 2
        assert "does not exist" in page
        later.mkdir()
        make_run([start(), step(1)], name="later/b")
        status, content, renewed = client.get(f"/content?have={headers['X-Version']}")
        assert (status, content.count("<article")) == (200, 2)
        assert f'<a href="/run/0">{later}/b</a>' in content
        make_run([start(), step(1)], name="later/a")
        status, content, renewed = client.get(f"/content?have={renewed['X-Version']}")
        assert (status, content.count("<article")) == (200, 3)
        for number, path in enumerate((later / "b", other, later / "a")):
            assert f'<a href="/run/{number}">{path}</a>' in content
        monkeypatch.setattr(module, "MAX_RUNS", 3)
        make_run([start()], name="later/c")
        content = client.get("/content")[1]
        assert content.count("<article") == 3
