"""The supervisor: signals reach the ranks, survivors learn of a loss at once, nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, TCPStore

from paceline.cli.failure import Failure
from paceline.cli.launch import exit_code_or_cause
from paceline.cli.nodes import LOOPBACK, Node
from paceline.cli.supervisor import JobEnd, RankEnd, Supervisor
from paceline.comm.losses import LossLog
from paceline.core.errors import ConfigError, LaunchError

WAITS = "import time; time.sleep(600)"


def started(code: str) -> Callable[[dict[str, str]], subprocess.Popen[bytes]]:
    """Starts interpreters without site packages, which take a hundredth of a second."""

    def start(env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]
        return subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)

    return start


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join(60)


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ranks_get_torchruns_environment(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE", "PACELINE_LAUNCHER", "PACELINE_SUPERVISOR")  # fmt: skip
    code = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write("
    code += f"' '.join(os.environ.get(n, '-') for n in {names}))"
    with Supervisor(started(code), Node(2), min_ranks=1) as supervisor:
        port = supervisor.store.port
        assert supervisor.run() == JobEnd(survived=True)
    own = os.getpid()
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [
        f"{rank} {rank} 2 2 0 {port} True {own} {own}" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT]
)
def test_a_signal_stops_all_ranks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Supervisor(started(WAITS), Node(2), max_restarts=3) as supervisor:

        def send() -> None:
            wait_until(lambda: len(supervisor.pids) == 2)
            os.kill(os.getpid(), number)

        with meanwhile(send):
            end = supervisor.run(stops=[signal.SIGUSR2])
    assert end.stopped_by is number
    assert exit_code_or_cause(end) == 128 + number
    assert not supervisor.pids
    assert signal.getsignal(number) is before


def test_a_rank_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.supervisor._STOP_S", 0.2)
    code = f"os.environ['RANK'] == '0' and sys.exit(7)\nsignal.signal(15, signal.SIG_IGN)\n{WAITS}"
    with Supervisor(started(code), Node(2)) as supervisor:
        end = supervisor.run()
    assert end.failures[0] == RankEnd(7)
    assert end.failures[1].exitcode in (-signal.SIGKILL, -signal.SIGTERM)
    cause = exit_code_or_cause(end)
    assert isinstance(cause, Failure)
    assert cause.line.startswith("rank 0 ended with exit code 7")


def test_a_request_to_save_goes_to_ranks_that_handle_it(tmp_path: Path) -> None:
    """A rank whose interpreter is still starting keeps running."""
    code = f"""
rank, folder = os.environ["RANK"], {str(tmp_path)!r}
def asked(*_):
    open(folder + "/asked", "w").close()
if rank == "0":
    signal.signal(10, asked)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{10}})
open(folder + "/up" + rank, "w").close()
while not os.path.exists(folder + "/asked"):
    time.sleep(0.005)
"""
    with Supervisor(started(code), Node(2)) as supervisor:

        def send() -> None:
            wait_until(lambda: len(list(tmp_path.glob("up*"))) == 2)
            # Sent to the starting rank itself, and to the supervisor.
            os.kill(supervisor.pids[1], signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)

        with meanwhile(send):
            end = supervisor.run(saves=[signal.SIGUSR1])
    assert end == JobEnd()
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "os.kill(os.getppid(), signal.SIGHUP)"
        with Supervisor(started(code), Node(1)) as supervisor:
            assert supervisor.run() == JobEnd()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_failed_ranks_start_again_with_the_same_store() -> None:
    code = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '2')"
    with Supervisor(started(code), Node(2), max_restarts=2) as supervisor:
        assert supervisor.run() == JobEnd()
    with Supervisor(started(code), Node(2), max_restarts=1) as supervisor:
        assert set(supervisor.run().failures) == {0, 1}


# Rank 1 ends with the files of the others, which wait until the supervisor has reported this.
LOST = """
import sys; sys.path[:0] = [path for path in {paths} if path]
from datetime import timedelta
from torch.distributed import DistNetworkError, TCPStore
from paceline.comm.losses import LossLog
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
log, rank = LossLog(store), int(os.environ["RANK"])
log.begin()
{acts}
"""


def with_log(acts: str) -> Callable[[dict[str, str]], subprocess.Popen[bytes]]:
    return started(LOST.format(paths=sys.path, acts=acts))


def test_survivors_continue_and_lost_ranks_are_in_the_log() -> None:
    """Two ranks that end together are one entry of the log, or two on a busy machine."""
    acts = "os.kill(os.getpid(), 9) if rank in (1, 2) else None\n"
    acts += "while len(log.lost) < 2: log.wait(60)\nlog.finish()"
    with Supervisor(with_log(acts), Node(4), min_ranks=2) as supervisor:
        end = supervisor.run()
        log = LossLog(supervisor.store)
        log.read()
    assert sorted(log.lost) == [1, 2]
    assert all("was ended by SIGKILL" in cause for cause in log.lost.values())
    assert {rank: found.exitcode for rank, found in end.failures.items()} == {1: -9, 2: -9}
    assert end.survived
    assert exit_code_or_cause(end) == 0


def test_no_thread_waits_for_the_store_after_the_end() -> None:
    """Such a wait would end with the store, while the interpreter exits, and abort the process."""
    with Supervisor(with_log("log.finish()"), Node(2), min_ranks=1) as supervisor:
        # Another supervisor has ended before.
        LossLog(supervisor.store).evict(2, "node 1 has ended")
        assert supervisor.run().survived
        assert "paceline-evict" not in {thread.name for thread in threading.enumerate()}


def test_a_stopped_rank_is_evicted_and_never_wakes_up() -> None:
    acts = "os.kill(os.getpid(), signal.SIGSTOP) if rank else log.evict(1, 'rank 1 is silent')\n"
    acts += "while not log.lost: log.wait(60)\nsys.exit(log.lost[1] != 'rank 1 is silent')"
    with Supervisor(with_log(acts), Node(2), min_ranks=1) as supervisor:
        end = supervisor.run()
    assert end.failures == {1: RankEnd(-signal.SIGKILL)}
    assert exit_code_or_cause(end) == 0


def test_a_lost_rank_starts_again_if_asked_to(tmp_path: Path) -> None:
    code = f"file = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
    code += "os.path.exists(file) and sys.exit(0)\nopen(file, 'w').close()\nsys.exit(5)"
    with Supervisor(started(code), Node(1), min_ranks=1, respawns=1) as supervisor:
        LossLog(supervisor.store).begin()
        assert exit_code_or_cause(supervisor.run()) == 0


def test_all_ranks_lost_is_a_failure() -> None:
    with Supervisor(started("os.kill(os.getpid(), 9)"), Node(2), min_ranks=1) as supervisor:
        LossLog(supervisor.store).begin()
        cause = exit_code_or_cause(supervisor.run())
    assert isinstance(cause, Failure)
    assert "was ended by SIGKILL" in cause.line


def test_a_rank_that_is_lost_before_all_have_met_ends_the_job() -> None:
    code = f"os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\n{WAITS}"
    with Supervisor(started(code), Node(2), min_ranks=1) as supervisor:
        end = supervisor.run()
    assert end.failures == {1: RankEnd(-signal.SIGKILL), 0: RankEnd(-signal.SIGTERM)}
    assert isinstance(exit_code_or_cause(end), Failure)


def test_a_lost_store_ends_the_ranks_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the second node when the first one is lost; ranks get SIGTERM and time to save."""

    def lost(log: LossLog) -> bool:
        raise DistNetworkError("the connection was closed")

    monkeypatch.setattr(LossLog, "has_begun", lost)
    code = f"os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\n{WAITS}"
    with Supervisor(started(code), Node(2), min_ranks=1) as supervisor:
        end = supervisor.run()
    assert end.failures == {1: RankEnd(-signal.SIGKILL), 0: RankEnd(-signal.SIGTERM)}


def test_nodes_share_the_store_of_the_first_one() -> None:
    """All ranks of the first node are lost; the second node goes on, and the first keeps the store."""
    port = _free_port()
    acts = "import random\nrank < 2 and os.kill(os.getpid(), 9)\n"
    acts += "while len(log.lost) < 2: log.wait(60)\nlog.finish()"
    program = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]}
from cli.test_supervisor import *
node = Node(2, 2, int(sys.argv[1]), "127.0.0.1", {port}, 60)
with Supervisor(with_log({acts!r}), node, min_ranks=1) as supervisor:
    end = supervisor.run()
sys.exit(exit_code_or_cause(end) != 0 or not end.survived)
"""
    nodes = [subprocess.Popen([sys.executable, "-c", program, str(n)]) for n in (1, 0)]
    assert [node.wait(120) for node in nodes] == [0, 0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def test_nodes_with_other_numbers_are_refused() -> None:
    with Supervisor(started(""), Node(2, 2)) as first:
        node = Node(3, 2, 1, port=first.store.port)
        with pytest.raises(LaunchError, match="--nproc-per-node is 3 on node 1 and 2 on the first"):
            Supervisor(started(""), node)
    with pytest.raises(LaunchError, match="does not reach the first node"):
        Supervisor(started(""), Node(2, 2, 1, port=_free_port(), timeout_s=0.2))


@pytest.mark.parametrize(
    ("flags", "env", "place"),
    [
        ((1, None, None, 0), {"MASTER_ADDR": "a"}, Node(8)),
        ((2, 1, "a", 0), {}, Node(8, 2, 1, "a", 29500)),
        ((2, None, None, 7), {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[3-4]"},
         Node(8, 2, 1, "n3", 7)),
        ((2, None, None, 0), {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "b", "MASTER_PORT": "9"},
         Node(8, 2, 0, "b", 9)),
        ((2, None, "a", 0), {}, "--node-rank"),
        ((2, 2, "a", 0), {}, "--node-rank"),
        ((2, 0, None, 0), {}, "--master-addr"),
        ((1, 0, None, 0), {}, "--node-rank"),
        ((1, None, "a", 0), {}, "--master-addr"),
        ((1, None, None, -1), {}, "--master-port"),
    ],
)  # fmt: skip
def test_the_place_of_a_node(
    flags: tuple[int, int | None, str | None, int], env: dict[str, str], place: Node | str
) -> None:
    if isinstance(place, Node):
        assert Node.from_flags(8, *flags, env) == place
    else:
        with pytest.raises(ConfigError) as caught:
            Node.from_flags(8, *flags, env)
        assert caught.value.field == place


def test_the_store_of_one_node_listens_on_loopback_alone() -> None:
    with Supervisor(started(""), Node(1)) as supervisor:
        port = supervisor.store.port
        # All of 127.0.0.0/8 is this host's: a store that listens on every address would answer here.
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.2", port)) != 0
        client = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        client.set("word", "heard")
        assert supervisor.store.get("word") == b"heard"
        with pytest.raises(LaunchError, match="the port is in use"):
            Supervisor(started(""), Node(1, port=port))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (JobEnd({0: RankEnd(143), 1: RankEnd(143)}), 143),
        (JobEnd({1: RankEnd(-9)}, survived=True), 0),
        (JobEnd({1: RankEnd(-9), 0: RankEnd(143)}, stopped_by=signal.SIGINT), 130),
    ],
)
def test_exit_codes_of_jobs_without_a_failure(end: JobEnd, code: int) -> None:
    assert exit_code_or_cause(end) == code


def test_a_reported_failure_counts_although_the_job_went_on_without_a_rank() -> None:
    extra = {"trace": "", "exit_code": "1", "consequence": "0"}
    reported = RankEnd(1, {"message": "the disk is full", "extraInfo": extra})
    cause = exit_code_or_cause(JobEnd({1: RankEnd(-9), 0: reported}, survived=True))
    assert isinstance(cause, Failure)
    assert cause.line == "the disk is full"
