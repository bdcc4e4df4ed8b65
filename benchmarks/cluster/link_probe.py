"""Measures a link with a small program at each end: `serve`, and `send ADDRESS`, which prints JSON.

Uses the standard library only, so that it starts quickly; reports medians, because the machine may be
shared.
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
    """Bandwidth of one TCP stream, without headers, and round trip of the idle link."""

    bits_per_s: float
    round_trip_s: float


def serve() -> None:
    """Echoes small messages of one sender, then measures what it receives and sends the samples
    back."""
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
        _receive(link, _SAMPLE_S)  # TCP ramps up, and the token bucket's first burst is used up
        samples = [_receive(link, _SAMPLE_S) for _ in range(_SAMPLES)]
        link.sendall(json.dumps(samples).encode())
        # Closing with unread bytes would reset the connection and lose the answer.
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 18):
            pass


def _receive(link: socket.socket, sample_s: float) -> float:
    """Bits per second of one sample."""
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
        answer, deadline = b"", time.monotonic() + _LIMIT_S
        while not answer.endswith(b"]"):
            if time.monotonic() > deadline:
                raise TimeoutError("the receiver did not answer")
            try:
                link.send(_CHUNK)
            except BlockingIOError:
                time.sleep(0.0005)
            try:
                answer += link.recv(1 << 12)
            except BlockingIOError:
                continue
    return LinkSpeed(statistics.median(json.loads(answer)), statistics.median(trips))


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
    else:
        speed = send(sys.argv[2])
        sys.stdout.write(json.dumps([speed.bits_per_s, speed.round_trip_s]) + "\n")


if __name__ == "__main__":
    main()
