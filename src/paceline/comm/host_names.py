"""Keeps torch's rendezvous store from asking a name server.

`TCPStore` looks up the host name of every peer for its log lines: the client once a connection, the
server in its only thread for each connection that it accepts. Where the name server does not answer,
each lookup takes seconds, and a rendezvous of 256 ranks took a minute.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG = Path("/etc/nsswitch.conf")
_DEFAULT_SOURCES = "files dns"

_lock = threading.Lock()
_users = 0


@contextmanager
def names_from_files() -> Iterator[None]:
    """Within this context the process looks host names up in /etc/hosts alone, so nothing in it may
    have to resolve a name. Does nothing where the C library is not glibc."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _look_up_in("files")
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _look_up_in(_configured_sources())


def _look_up_in(sources: str) -> None:
    """By the function that <nss.h> declares for this."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", sources.encode())


def _configured_sources() -> str:
    try:
        found = re.search(r"^\s*hosts:([^#\n]*)", _CONFIG.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return _DEFAULT_SOURCES
    return found[1].strip() if found else _DEFAULT_SOURCES
