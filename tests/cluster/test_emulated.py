"""A cluster exists inside its context, isolated, and is gone after it; its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.network import Namespace
from cluster.traces import PATIENCE_S, RANK_ENV, root_interfaces, traces
from paceline.core.errors import ConfigError, LaunchError


@pytest.mark.usefixtures("_machine")
class TestOnThisMachine:
    def test_namespaces_come_and_go_and_the_root_sees_no_interface(self) -> None:
        before = root_interfaces()
        with EmulatedCluster(3, rate="100mbit") as cluster:
            names = cluster.namespaces
            assert len(set(names)) == 4
            assert all(Namespace(name).exists() for name in names)
            assert root_interfaces() == before
        assert not traces(names)
        assert root_interfaces() == before

    def test_a_host_has_its_address_a_loopback_and_nothing_else(self) -> None:
        show = ["ip", "-brief", "address"]
        with EmulatedCluster(2) as cluster:
            lines = cluster.start(1, show).wait(PATIENCE_S).out[0].splitlines()
        found = {line.split()[0].partition("@")[0]: line.split()[2:] for line in lines}
        assert found == {"lo": ["127.0.0.1/8", "::1/128"], "eth0": ["10.213.0.2/24"]}

    def test_output_and_exit_codes_of_ranks(self) -> None:
        say = (
            'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"; echo no >&2; exit $RANK'
        )
        with EmulatedCluster(2) as cluster:
            ended = cluster.ranks(["sh", "-c", say], ranks=[2, 1]).wait(PATIENCE_S)
        assert ended.codes == [0, 1, 2]
        assert ended.out == ["0 of 3, 0 of 2\n", "1 of 3, 1 of 2\n", "2 of 3, 0 of 1\n"]
        assert ended.err == ["no\n"] * 3
        assert not ended.ok

    def test_a_job_that_takes_too_long_is_killed_and_the_hosts_named(self) -> None:
        with EmulatedCluster(2) as cluster:
            job = cluster.ranks(["sh", "-c", "echo here; test $RANK = 0 || sleep 600"], ranks=1)
            said = job.file(1, "stdout")
            job.wait_until(lambda: job.processes[0].poll() == 0 and said.read_text(), PATIENCE_S)
            with pytest.raises(
                LaunchError, match=r"still running on hosts \[1\] after 1 s"
            ) as told:
                job.wait(1)
            assert not job.running()
            assert "here" in told.value.__notes__[0]
            assert not Namespace(cluster.namespaces[1]).processes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": 0}, "hosts = 0: must be 1 to 250"),
        ({"hosts": 2, "rate": "fast"}, "rate = 'fast': is not a rate of a link"),
        ({"hosts": 2, "rate": "200"}, "write 200mbit or 1gbit"),
        ({"hosts": 2, "rate": ["1gbit"]}, "must be one, or one for each of 2 hosts"),
    ],
)
def test_what_cannot_be(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EmulatedCluster(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [0, [1, 0], [1, 1, 1], []])
def test_ranks_and_hosts_that_do_not_fit(ranks: int | list[int]) -> None:
    with pytest.raises(ConfigError, match="does not fit 2 hosts"):
        EmulatedCluster(2).torchrun(["true"], ranks=ranks)
    with pytest.raises(ConfigError, match="host = 2: the cluster has hosts 0 to 1"):
        EmulatedCluster(2).cut(2)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", *arguments],
        env=os.environ | RANK_ENV, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.usefixtures("_machine")
def test_the_command_shows_rank_0_and_fails_with_any_rank() -> None:
    say = 'echo "rank $RANK of $WORLD_SIZE"; test $RANK = 0 && exit; sleep 1; echo bad >&2; exit 9'
    flags = ["--torchrun", "--hosts", "1", "--ranks-per-host", "2", "--link-mbit", "100", "--"]
    done = call(*flags, "sh", "-c", say)
    assert done.returncode == 1
    assert done.stdout == "rank 0 of 2\n"
    assert done.stderr == "rank 1: bad\npaceline: error: the exit codes are [1]\n"


@pytest.mark.usefixtures("_machine")
def test_a_benchmark_on_the_ranks_of_hosts() -> None:
    flags = (
        "--hosts 2 --link-mbit 100 -- -m paceline bench allreduce --bytes 256KiB --algorithms ring"
    )
    done = call(*flags.split(), "--iterations", "3", "--warm-up", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["cluster"]["hosts"], report["cluster"]["ranks_per_host"]) == (2, [1, 1])
    assert [row["algorithm"] for row in report["rows"]] == ["native", "ring"]


@pytest.mark.usefixtures("_machine")
def test_a_bad_flag_of_the_command_is_one_line() -> None:
    done = call("--ranks-per-host", "two", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: error: --ranks-per-host = 'two'")
    assert done.stderr.count("\n") == 1
