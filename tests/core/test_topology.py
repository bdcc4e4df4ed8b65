"""Topology from each launcher's environment, and an error for each environment that misleads."""

from dataclasses import replace

import pytest

from paceline.core.errors import CommError
from paceline.core.topology import DEFAULT_PORT, Topology, first_slurm_host

Env = dict[str, str]

TORCHRUN: Env = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM: Env = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,9],login",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_ID": "1234567",
}
OPENMPI: Env = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "4000",
}
PMI: Env = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "MASTER_ADDR": "node0",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


WRONG: dict[str, tuple[Env, ...]] = {
    "LOCAL_WORLD_SIZE": (
        without(TORCHRUN, "LOCAL_WORLD_SIZE"), {**TORCHRUN, "LOCAL_WORLD_SIZE": "0"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "1.5"},
    ),
    "LOCAL_RANK": (without(TORCHRUN, "LOCAL_RANK"), {**TORCHRUN, "LOCAL_RANK": ""}),
    "local rank 4": ({**TORCHRUN, "LOCAL_RANK": "4"},),
    "RANK": ({"WORLD_SIZE": "4"}, {**TORCHRUN, "RANK": "two"}),
    "rank 8": ({**TORCHRUN, "RANK": "8"},),
    "rank -1": ({**TORCHRUN, "RANK": "-1"},),
    "WORLD_SIZE": ({"RANK": "0"}, {**TORCHRUN, "WORLD_SIZE": "two"}),
    "a world of": (
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "1048577", "MASTER_ADDR": "a"},
        {"RANK": "0", "WORLD_SIZE": "99999999999999999999", "MASTER_ADDR": "a"},
    ),
    "MASTER_ADDR": (
        {**TORCHRUN, "MASTER_ADDR": ""}, without(OPENMPI, "MASTER_ADDR"),
        without(PMI, "MASTER_ADDR"), without(SLURM, "SLURM_STEP_NODELIST"),
    ),
    "MASTER_PORT": ({**TORCHRUN, "MASTER_PORT": "0"}, {**TORCHRUN, "MASTER_PORT": "65536"}),
    "TASKS_PER_NODE": tuple(
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks} for tasks in ("4(xy),3", "x", "4(x2),", "4")
    ),
    "SLURM_NODEID": ({**SLURM, "SLURM_NODEID": "x"},),
    "MPI_LOCALNRANKS": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {**PMI, "MPI_LOCALNRANKS": "9"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "env"), [(name, env) for name, given in WRONG.items() for env in given]
)
def test_what_is_missing_or_does_not_fit_is_named_in_one_line(name: str, env: Env) -> None:
    with pytest.raises(CommError) as caught:
        Topology.from_env(env)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_node_of_many_tasks_is_not_listed() -> None:
    """A repetition from outside allocates nothing."""
    for size in ("99999999999999999999", "1048577"):
        env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": f"4(x{size}),3"}
        assert Topology.from_env(env).local_world_size == 4


KUBERNETES = {
    "RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
}  # fmt: skip
MPIRUN_ALONE = without(OPENMPI, "MASTER_ADDR", "MASTER_PORT") | {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}  # fmt: skip
SINGLE = Topology(0, 1, 0, 1, 0, "127.0.0.1", DEFAULT_PORT, "single")
BY_TORCHRUN = Topology(5, 8, 1, 4, 1, "node0", 29511, "torchrun")
BY_SLURM = Topology(9, 11, 1, 3, 2, "gpu003", 20000 + 1234567 % 20000, "slurm")
BY_PMI = Topology(3, 4, 1, 2, 1, "node0", DEFAULT_PORT, "mpi")
FOUND: dict[str, tuple[Env, Topology]] = {
    "nothing is a single process": ({"HOME": "/home/a"}, SINGLE),
    "a shell inside an allocation is one": (without(SLURM, "SLURM_STEP_ID"), SINGLE),
    "torchrun": (TORCHRUN, BY_TORCHRUN),
    "torchrun wins over the scheduler that it runs in": (SLURM | OPENMPI | TORCHRUN, BY_TORCHRUN),
    "kubernetes sets ranks, but no local ones":
        (KUBERNETES, Topology(2, 3, 0, 1, 2, "job-master-0", 23456, "environment")),
    "ranks by hand on two nodes":
        (without(TORCHRUN, "GROUP_RANK", "TORCHELASTIC_RUN_ID"),
         replace(BY_TORCHRUN, launcher="environment")),
    "slurm": (SLURM, BY_SLURM),
    "srun with pmi": (SLURM | {"PMI_RANK": "9", "PMI_SIZE": "11"}, BY_SLURM),
    "openmpi": (OPENMPI, Topology(3, 4, 1, 2, 1, "node0", 4000, "openmpi")),
    "openmpi on one node meets on the loopback address":
        (MPIRUN_ALONE, Topology(3, 4, 3, 4, 0, "127.0.0.1", DEFAULT_PORT, "openmpi")),
    "pmi": (PMI, BY_PMI),
    "pmi without a local rank": (without(PMI, "MPI_LOCALRANKID"), BY_PMI),
    "pmi on one node meets on the loopback address":
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
         Topology(1, 2, 1, 2, 0, "127.0.0.1", DEFAULT_PORT, "mpi")),
}  # fmt: skip


@pytest.mark.parametrize(("env", "topology"), FOUND.values(), ids=FOUND)
def test_what_an_environment_says(env: Env, topology: Topology) -> None:
    found = Topology.from_env(env)
    assert found == topology
    assert found.is_main == (topology.rank == 0)


def test_launchers_in_one_another() -> None:
    assert Topology.from_env(SLURM | OPENMPI).launcher == "openmpi"
    assert Topology.from_env(SLURM | PMI).launcher == "mpi"
    # Nodes are numbered by the rank, not by Open MPI's node rank.
    last_of_first = OPENMPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_NODE_RANK": "1"}
    assert Topology.from_env(last_of_first).node_rank == 0


@pytest.mark.parametrize(("node", "local_world_size"), [(0, 4), (1, 4), (2, 3)])
def test_slurm_tasks_per_node(node: int, local_world_size: int) -> None:
    env = {**SLURM, "SLURM_NODEID": str(node)}
    assert Topology.from_env(env).local_world_size == local_world_size


def test_slurm_without_tasks_per_node_divides_evenly() -> None:
    env = without(SLURM, "SLURM_STEP_TASKS_PER_NODE")
    env |= {"SLURM_NTASKS": "12", "SLURM_NNODES": "3"}
    assert Topology.from_env(env).local_world_size == 4


def test_slurm_falls_back_to_the_jobs_lists_and_obeys_master_variables() -> None:
    env = without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    env |= {"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    assert Topology.from_env(env).master_addr == "a1"
    chosen = Topology.from_env({**env, "MASTER_ADDR": "b", "MASTER_PORT": "1024"})
    assert (chosen.master_addr, chosen.master_port) == ("b", 1024)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("", None),
        ("gpu1", "gpu1"),
        ("gpu[003-007,9],login", "gpu003"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("cube[1-2][5,7],x", "cube15"),
        ("gpu-a[01-02]-ib", "gpu-a01-ib"),
        ("gpu-[01-02].cluster.example,x[1-2]", "gpu-01.cluster.example"),
    ],
)
def test_first_slurm_host(nodelist: str, host: str | None) -> None:
    assert first_slurm_host(nodelist) == host


@pytest.mark.parametrize(
    ("env", "together"),
    [
        ({}, True), (TORCHRUN, False), (TORCHRUN | {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}, True),
        (OPENMPI, True), (SLURM, False), (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), False),
    ],
)  # fmt: skip
def test_launchers_that_end_all_ranks_together(env: Env, together: bool) -> None:
    assert Topology.from_env(env).ends_together == together
