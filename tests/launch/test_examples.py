"""The files in examples/launch fit the launchers, the flags and each other; nothing is started here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from launch.jobs import EXAMPLES, ROOT, called, environment
from paceline.cli.app import app
from paceline.cli.train import resolve
from paceline.config import CheckpointSettings
from paceline.core.topology import Topology

SCRIPTS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
USERS = ["imagenet-resnet50", "--data-dir", "/data", "--output", "/shared/with space/run"]


def train_parameters(command: list[str]) -> dict[str, Any]:
    """What `… -m paceline train ARGUMENTS` means; fails for a flag or a setting that does not exist."""
    at = command.index("-m")
    assert command[at : at + 3] == ["-m", "paceline", "train"]
    train = typer.main.get_command(app).get_command(None, "train")  # type: ignore[attr-defined]
    parameters = dict(train.make_context("train", command[at + 3 :]).params)
    data = {"data.dir": parameters["data_dir"]} if parameters["data_dir"] else {}
    resolve(parameters["recipe"], data, parameters["settings"])
    return parameters


def torchrun_options(argv: list[str]) -> Any:
    from torch.distributed.run import parse_args

    options = parse_args(argv)
    assert (options.module, options.training_script) == (True, "paceline")
    return options


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_say_how_they_are_used(name: str) -> None:
    script = EXAMPLES / name
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=200)
    bare = ["bash", str(script)]
    done = subprocess.run(bare, env=environment({}), capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_torchrun_on_several_nodes(tmp_path: Path) -> None:
    place = {"NODES": "4", "HEAD_NODE": "node0", "RANKS_PER_NODE": "8"}
    argv, _ = called(tmp_path, "torchrun_multi_node.sh", "torchrun", USERS, **place)
    options = torchrun_options(argv)
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("4", "8", 3)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "node0:29400")
    assert train_parameters(argv)["output"] == USERS[-1]


def test_mpirun_on_several_nodes(tmp_path: Path) -> None:
    nccl = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_GID_INDEX": "3"}
    place = {"HOSTS": "node0,node1", "RANKS_PER_NODE": "8", **nccl}
    argv, env = called(tmp_path, "mpirun.sh", "mpirun", USERS, **place)
    assert (argv[argv.index("-n") + 1], argv[argv.index("--host") + 1]) == ("16", "node0:8,node1:8")
    exported = {argv[i + 1] for i, word in enumerate(argv) if word == "-x"}
    assert exported == {"MASTER_ADDR", "MASTER_PORT", *nccl}
    assert train_parameters(argv)["recipe"] == "imagenet-resnet50"
    ninth = {
        "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8", **{name: env[name] for name in exported},
    }  # fmt: skip
    assert Topology.from_env(ninth) == Topology(9, 16, 1, 8, 1, "node0", 29500, "openmpi")


def test_slurm_tasks_resume_and_get_their_cores(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12"}
    argv, _ = called(tmp_path, "slurm.sbatch", "srun", USERS, **job)
    parameters = train_parameters(argv)
    assert (parameters["resume"], parameters["workers"]) == ("auto", "12")
    assert list(parameters["settings"]) == ["run.threads=12"]
    assert parameters["output"] == USERS[-1]


def test_slurm_directives() -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    head = text[: text.index("\nset ")]
    # sbatch stops reading directives at the first command.
    assert all(line.startswith("#") for line in head.splitlines() if line)
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE))
    assert len(directives) == text.count("#SBATCH ")
    assert directives["ntasks-per-node"] == directives["gpus-per-node"]
    name, seconds = directives["signal"].split("@")
    assert name == "USR2"
    assert CheckpointSettings().on_sigusr2 == "stop"
    assert int(seconds) > 30
    assert {"requeue", "time", "open-mode"} <= directives.keys()


class TestPyTorchJob:
    """The manifest against what the operator and Kubernetes make of it."""

    job = yaml.safe_load((EXAMPLES / "kubernetes-pytorchjob.yaml").read_text())
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    pod = replicas["Master"]["template"]["spec"]
    container = pod["containers"][0]

    def test_is_a_pytorchjob_with_one_master_and_equal_workers(self) -> None:
        assert (self.job["apiVersion"], self.job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        assert set(self.replicas) == {"Master", "Worker"}
        assert self.replicas["Master"]["replicas"] == 1
        assert self.replicas["Worker"]["template"] == self.replicas["Master"]["template"]
        for replica in self.replicas.values():
            assert replica["restartPolicy"] == "OnFailure"

    def test_names_by_which_the_operator_finds_container_and_port(self) -> None:
        assert [c["name"] for c in self.pod["containers"]] == ["pytorch"]
        assert [port["name"] for port in self.container["ports"]] == ["pytorchjob-port"]

    def test_command_fits_the_sizes_and_the_variables_of_the_operator(self) -> None:
        given = {"RANK": "3", "MASTER_ADDR": "resnet50-master-0", "MASTER_PORT": "23456"}
        words = [*self.container["command"], *self.container["args"]]
        filled = [re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], word) for word in words]
        assert filled[0] == "torchrun"
        options = torchrun_options(filled[1:])
        pods = sum(replica["replicas"] for replica in self.replicas.values())
        assert int(options.nnodes) == pods
        assert (options.node_rank, options.master_addr) == (3, given["MASTER_ADDR"])
        assert options.master_port == self.container["ports"][0]["containerPort"]
        gpus = self.container["resources"]["limits"]["nvidia.com/gpu"]
        # The operator's API takes the number of processes as a text.
        assert self.spec["nprocPerNode"] == options.nproc_per_node == str(gpus)
        parameters = train_parameters(filled)
        assert parameters["resume"] == "auto"
        mounts = {mount["mountPath"] for mount in self.container["volumeMounts"]}
        assert parameters["data_dir"] in mounts
        assert str(Path(parameters["output"]).parent) in mounts

    def test_there_is_time_to_save_and_memory_to_share(self) -> None:
        assert self.pod["terminationGracePeriodSeconds"] > 30
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in self.container["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["shm"] == "/dev/shm"


def test_the_page_names_only_variables_that_are_read() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "src/paceline").rglob("*.py"))
    table = page[page.index("| launcher |") : page.index("## Gradient exchange")]
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    assert len(named) > 5
    assert {name for name in named if name not in sources} == set()
