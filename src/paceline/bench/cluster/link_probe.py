"""The speed of a link, by a small program at each end.

In: `serve`, or `send ADDRESS`. Out: the sender prints round trip and bandwidth as JSON. It needs nothing
but Python's own library, and starts in a moment. Medians, because others use the machine as well.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from dataclasses import dataclass

PORT = 29000
_ROUND_TRIPS = 30
_SAMPLES = 10
_SAMPLE_S = 0.1
_CHUNK = bytes(1 << 16)
_LIMIT_S = 10.0


@dataclass(frozen=True)
class LinkSpeed:
    """What a TCP stream gets of the link, without headers, and the idle link's round trip."""

    bits_per_s: float
    round_trip_s: float


def serve() -> None:
    """Answers the small messages of one sender, then counts what comes and tells the samples."""
    with socket.create_server(("", PORT)) as listener:
        listener.settimeout(_LIMIT_S)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        link, _ = listener.accept()
    with link:
        link.settimeout(_LIMIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUND_TRIPS):
            link.send(link.recv(1))
        _receive(
            link, _SAMPLE_S
        )  # the stream finds its pace, and the bucket's first burst is spent
        samples = [_receive(link, _SAMPLE_S) for _ in range(_SAMPLES)]
        link.sendall(json.dumps(samples).encode())
        # Closed with bytes unread, the connection would be reset, and the answer lost with it.
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 18):
            pass


def _receive(link: socket.socket, sample_s: float) -> float:
    """Bits per second over one sample."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < sample_s:
        count += len(link.recv(1 << 18))
    return 8 * count / (time.perf_counter() - start)


def send(address: str) -> LinkSpeed:
    with socket.create_connection((address, PORT), timeout=_LIMIT_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_ROUND_TRIPS):
            start = time.perf_counter()
            link.send(b"?")
            link.recv(1)
            trips.append(time.perf_counter() - start)
        link.setblocking(False)
        told, deadline = b"", time.monotonic() + _LIMIT_S
        while not told.endswith(b"]"):
            if time.monotonic() > deadline:
                raise TimeoutError("the receiver did not answer")
            try:
                link.send(_CHUNK)
            except BlockingIOError:
                time.sleep(0.0005)
            try:
                told += link.recv(1 << 12)
            except BlockingIOError:
                continue
    return LinkSpeed(statistics.median(json.loads(told)), statistics.median(trips))


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
    else:
        speed = send(sys.argv[2])
        sys.stdout.write(json.dumps([speed.bits_per_s, speed.round_trip_s]) + "\n")


if __name__ == "__main__":
    main()
