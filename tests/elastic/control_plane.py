"""`python -m elastic.control_plane --ranks 1024`: the seconds until survivors agree after a loss.

Forked processes without a model join a store that this process holds, as a supervisor does. One or some
are killed, and the others form the next generation; they do not connect process groups.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from paceline.comm.generations import Generations
from paceline.comm.losses import LossLog
from paceline.comm.store import names_from_files
from paceline.core.topology import Topology

_LIMIT_S = 300.0


def agreement_s(ranks: int, lost: int = 1) -> list[float]:
    """Returns, for each survivor, the seconds from the loss until it knows the next generation."""
    wait = timedelta(seconds=_LIMIT_S)
    with names_from_files(), tempfile.TemporaryDirectory() as folder, _many_files(4 * ranks):
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        log = LossLog(server)
        results = Path(folder) / "results"
        results.touch()
        gc.freeze()
        reader, writer = os.pipe()
        # They connect once all are forked, so that none inherits the connections of others.
        gate = (reader, writer)
        children = {rank: _fork(rank, ranks, server.port, results, gate) for rank in range(ranks)}
        os.close(writer)
        os.close(reader)
        try:
            while not log.has_begun():
                time.sleep(0.02)
            gone = list(range(1, 1 + lost))
            started = time.monotonic()
            for rank in gone:
                os.kill(children[rank], signal.SIGKILL)
            for rank in gone:
                os.waitpid(children.pop(rank), 0)
            log.report(gone, f"{lost} ranks were killed")
            deadline = started + _LIMIT_S
            while len(lines := results.read_text().splitlines()) < ranks - lost:
                assert time.monotonic() < deadline, f"{len(lines)} of {ranks - lost} have agreed"
                time.sleep(0.02)
        finally:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    assert {json.loads(line)[1] for line in lines} == {ranks - lost}
    return sorted(json.loads(line)[0] - started for line in lines)


def _fork(rank: int, ranks: int, port: int, results: Path, gate: tuple[int, int]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.close(gate[1])
        os.read(gate[0], 1)
        wait = timedelta(seconds=_LIMIT_S)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
        topology = Topology(rank, ranks, rank, ranks, 0, "127.0.0.1", port, launcher="torchrun")
        generations = Generations(PrefixStore("job", store), topology, _LIMIT_S)
        store.set(f"ready/{rank}", "")
        if rank == 0:
            store.wait([f"ready/{other}" for other in range(ranks)], wait)
            generations.begin()
        while not generations.lost_within(_LIMIT_S):
            pass
        generations.form(lambda generation: None)
        line = json.dumps([time.monotonic(), len(generations.current.members)])
        with results.open("a") as file:  # one write a line: they do not mix
            file.write(line + "\n")
        time.sleep(_LIMIT_S)
    finally:
        os._exit(1)


@contextmanager
def _many_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(before[0], count), before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elastic.control_plane", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--lost", type=int, default=1)
    options = parser.parse_args()
    for ranks in options.ranks:
        taken = agreement_s(ranks, options.lost)
        row = {"ranks": ranks, "lost": options.lost, "last_s": round(taken[-1], 3)}
        sys.stdout.write(json.dumps(row | {"median_s": round(taken[len(taken) // 2], 3)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
