"""Topology from each launcher's environment, and an error for each environment that misleads."""

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


def fails(env: Env) -> str:
    """The error's text, which must be one line."""
    with pytest.raises(CommError) as info:
        Topology.from_env(env)
    text = str(info.value)
    assert len(text.splitlines()) == 1
    assert ";" in text, "an error names its remedy"
    return text


def test_nothing_in_the_environment_is_a_single_process() -> None:
    topology = Topology.from_env({"HOME": "/home/a"})
    assert topology == Topology(0, 1, 0, 1, 0, "127.0.0.1", DEFAULT_PORT, "single")
    assert topology.is_main


def test_torchrun() -> None:
    topology = Topology.from_env(TORCHRUN)
    assert topology == Topology(5, 8, 1, 4, 1, "node0", 29511, "torchrun")
    assert not topology.is_main


def test_torchrun_wins_over_the_scheduler_it_runs_in() -> None:
    assert Topology.from_env({**SLURM, **OPENMPI, **TORCHRUN}) == Topology.from_env(TORCHRUN)


def test_kubernetes_sets_ranks_but_no_local_ones() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    topology = Topology.from_env(env)
    assert topology == Topology(2, 3, 0, 1, 2, "job-master-0", 23456, "environment")


def test_ranks_by_hand_on_two_nodes() -> None:
    env = without(TORCHRUN, "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    assert Topology.from_env(env) == Topology(5, 8, 1, 4, 1, "node0", 29511, "environment")


def test_local_rank_without_its_world_is_no_guess() -> None:
    assert "LOCAL_WORLD_SIZE is not set" in fails(without(TORCHRUN, "LOCAL_WORLD_SIZE"))
    assert "LOCAL_RANK is not set" in fails(without(TORCHRUN, "LOCAL_RANK"))


def test_slurm() -> None:
    topology = Topology.from_env(SLURM)
    assert topology == Topology(9, 11, 1, 3, 2, "gpu003", 20000 + 1234567 % 20000, "slurm")


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


def test_a_shell_inside_an_allocation_is_a_single_process() -> None:
    assert Topology.from_env(without(SLURM, "SLURM_STEP_ID")).launcher == "single"


@pytest.mark.parametrize("tasks", ["4(xy),3", "x", "4(x2),", "4"])
def test_slurm_tasks_that_cannot_be_read_are_named(tasks: str) -> None:
    env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert f"{tasks!r} cannot be read" in fails(env)


def test_slurm_node_that_is_no_number_is_the_cause_named() -> None:
    assert "SLURM_NODEID = 'x' is not a whole number" in fails({**SLURM, "SLURM_NODEID": "x"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("", None),
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[9,003-007]", "gpu9"),
        ("login,gpu[1-3]", "login"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("cube[1-2][5,7],x", "cube15"),
        ("gpu-a[01-02]-ib", "gpu-a01-ib"),
        ("gpu-[01-02].cluster.example,x[1-2]", "gpu-01.cluster.example"),
    ],
)
def test_first_slurm_host(nodelist: str, host: str | None) -> None:
    assert first_slurm_host(nodelist) == host


def test_openmpi_numbers_nodes_by_rank_not_by_its_node_rank() -> None:
    assert Topology.from_env(OPENMPI) == Topology(3, 4, 1, 2, 1, "node0", 4000, "openmpi")
    last_of_first = {
        **OPENMPI,
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
    }
    assert Topology.from_env(last_of_first).node_rank == 0


def test_openmpi_on_one_node_meets_on_the_loopback_address() -> None:
    env = without({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "MASTER_ADDR", "MASTER_PORT")
    env["OMPI_COMM_WORLD_LOCAL_RANK"] = "3"
    assert Topology.from_env(env) == Topology(3, 4, 3, 4, 0, "127.0.0.1", DEFAULT_PORT, "openmpi")


def test_mpirun_inside_a_slurm_allocation_is_mpirun() -> None:
    assert Topology.from_env({**SLURM, **OPENMPI}).launcher == "openmpi"
    assert Topology.from_env({**SLURM, **PMI}).launcher == "mpi"


def test_srun_with_pmi_is_slurm() -> None:
    env = {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "11"}
    assert Topology.from_env(env) == Topology.from_env(SLURM)


def test_pmi() -> None:
    assert Topology.from_env(PMI) == Topology(3, 4, 1, 2, 1, "node0", DEFAULT_PORT, "mpi")
    assert Topology.from_env(without(PMI, "MPI_LOCALRANKID")).local_rank == 1


def test_pmi_on_one_node_meets_on_the_loopback_address() -> None:
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert Topology.from_env(env) == Topology(1, 2, 1, 2, 0, "127.0.0.1", DEFAULT_PORT, "mpi")


def test_pmi_without_local_ranks_is_no_guess() -> None:
    assert "MPI_LOCALNRANKS is not set" in fails({"PMI_RANK": "1", "PMI_SIZE": "2"})


@pytest.mark.parametrize(
    "env",
    [
        without(TORCHRUN, "MASTER_ADDR"),
        {**TORCHRUN, "MASTER_ADDR": ""},
        without(OPENMPI, "MASTER_ADDR"),
        without(PMI, "MASTER_ADDR"),
        without(SLURM, "SLURM_STEP_NODELIST"),
    ],
)
def test_several_nodes_need_an_address(env: Env) -> None:
    assert "MASTER_ADDR is not set" in fails(env)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["two", "", "1.5"])
def test_what_is_no_whole_number_is_named(name: str, value: str) -> None:
    assert f"{name} = {value!r} is not a whole number" in fails({**TORCHRUN, name: value})


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_out_of_range_is_named(port: str) -> None:
    assert f"MASTER_PORT = {port} is not a port" in fails({**TORCHRUN, "MASTER_PORT": port})


@pytest.mark.parametrize("rank", ["8", "9", "-1"])
def test_a_rank_outside_the_world_fails(rank: str) -> None:
    assert f"rank {rank} does not fit a world of 8" in fails({**TORCHRUN, "RANK": rank})


@pytest.mark.parametrize("size", ["99999999999999999999", "1048577"])
def test_a_world_that_no_system_has_fails(size: str) -> None:
    assert f"a world of {size} ranks" in fails(
        {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "a"}
    )
    tasks = f"4(x{size}),3"
    found = Topology.from_env({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert found.local_world_size == 4


@pytest.mark.parametrize(
    ("env", "together"),
    [
        ({}, True), (TORCHRUN, False), (TORCHRUN | {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}, True),
        (OPENMPI, True), (SLURM, False), (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), False),
    ],
)  # fmt: skip
def test_launchers_that_end_all_ranks_together(env: Env, together: bool) -> None:
    assert Topology.from_env(env).ends_together == together


def test_a_local_rank_outside_the_local_world_fails() -> None:
    assert "local rank 4 does not fit a local world of 4" in fails({**TORCHRUN, "LOCAL_RANK": "4"})


@pytest.mark.parametrize("size", ["0", "9"])
def test_a_local_world_outside_the_world_fails(size: str) -> None:
    text = fails({**TORCHRUN, "LOCAL_WORLD_SIZE": size})
    assert f"LOCAL_WORLD_SIZE = {size} does not fit a world of 8" in text
    assert "does not fit" in fails({**PMI, "MPI_LOCALNRANKS": size})


def test_world_size_without_rank_fails_and_the_other_way_round() -> None:
    assert "WORLD_SIZE = 4 but RANK is not set" in fails({"WORLD_SIZE": "4"})
    assert "RANK = 0 but WORLD_SIZE is not set" in fails({"RANK": "0"})
    assert Topology.from_env({"WORLD_SIZE": "1"}).launcher == "single"


def test_an_empty_world_fails() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "0"}
    assert "does not fit a world of 0" in fails(env)
