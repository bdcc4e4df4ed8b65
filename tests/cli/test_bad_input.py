"""Mistakes of the command line, of recipes and between ranks: one line, on every rank, within seconds."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import faults
from cli_runs import Call, events, run, run_two, small, started_ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train --model resnet51", "model.name = 'resnet51': is not a model; did you mean 'resnet"),
        ("train imagnet-resnet50", "recipe = 'imagnet-resnet50': unknown; did you mean 'imagenet-"),
        ("train nowhere.toml", "recipe = 'nowhere.toml': no such file; shipped: cifar10-resnet18"),
        ("train --epochs ten", "run.epochs = 'ten': is a str; give a whole number"),
        ("train --set data.image_size=big", "data.image_size = 'big': is a str; give a whole"),
        ("train --set optim.warm_epochs=1", "optim.warm_epochs: unknown setting; did you mean"),
        ("train --set optimizer.lr=1", "optimizer: unknown section; did you mean 'optim'?"),
        ("train --opt adamm", "optim.name = 'adamm': unknown; "),
        ("train --learning-rate 1", "--learning-rate"),
        ("train quickstart -b 100", "128: is not a multiple of 100 = 100 (batch size) × 1 (ranks); "
         "use 100 or 200, or --batch-size 64 or 128"),
        ("train quickstart -b 48 --nproc-per-node 2", "128: is not a multiple of 96 = 48 (batch "
         "size) × 2 (ranks); use 96 or 192, or --batch-size 32 or 64"),
        ("train --global-batch-size 100 --nproc-per-node 3", "100: cannot be divided among 3 "
         "ranks; use 99 or 102"),
        ("train --device cuda", "run.device = 'cuda': no CUDA device here; use --device cpu"),
        ("train --resume nowhere.pt", "no checkpoint at nowhere.pt; check --resume"),
        ("train --pretrained nowhere.pth", "nowhere.pth is not a file; give the path"),
    ],
)  # fmt: skip
def test_mistakes_in_flags(call: Call, arguments: str, words: str) -> None:
    if "--device cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = call(*arguments.split())
    assert words in done.error_line()
    assert done.code == (1 if "nowhere.p" in arguments else 2)
    assert not list(Path("runs").glob("*/config.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nepoch = 3\n", "run.epoch: unknown setting; did you mean 'epochs'?"),
        ("[runs]\nepochs = 3\n", "runs: unknown section; did you mean 'run'?"),
        ("epochs = 3\n", "epochs = 3: stands outside a section; did you mean 'run.epochs'?"),
        ("[run]\nepochs = '3'\n", "run.epochs = '3': is a str; give a whole number"),
        ("[run]\nepochs = true\n", "run.epochs = True: is a bool; give a whole number"),
        ("[run]\nepochs = 3\n[run]\n", "recipe = 'own.toml': is not TOML"),
        ("[run\n", "recipe = 'own.toml': is not TOML"),
        ("\xff\xfe", "recipe = 'own.toml': is not TOML"),
        ("[model]\nname = 'resnet500'\n", "model.name = 'resnet500': is not a model; did you"),
        ("[data]\nmean = [0.1, 0.2]\n", "data.mean = (0.1, 0.2): has 2 values for data.channels"),
    ],
)
def test_mistakes_in_a_recipe(call: Call, text: str, words: str) -> None:
    Path("own.toml").write_bytes(text.encode("latin-1"))
    done = call("train", "own.toml")
    assert words in done.error_line()
    assert done.code == 2


def test_two_ranks_with_different_configurations(tmp_path: Path) -> None:
    arguments = small("--output", "run")
    done = run_two(arguments, tmp_path, second=[*arguments, "--smoothing", "0.2"])
    for rank in done:
        assert rank.error_line() == (
            "ranks differ in run.smoothing: 0.1 on rank 0, 0.2 on rank 1; "
            "start every rank with the same recipe and flags"
        )
        assert rank.code == 2
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_ranks_do_not_divide(tmp_path: Path) -> None:
    arguments = small("--output", "run", "-b", "16")
    for rank in run_two(arguments, tmp_path):
        assert (
            "run.global_batch_size = 16: is not a multiple of 32 = 16 (batch size) × 2 (ranks); "
            "use 32, or --batch-size 4 or 8" in rank.error_line()
        )
        assert rank.code == 2


def test_out_of_memory_on_one_rank(tmp_path: Path) -> None:
    fault = partial(faults.out_of_memory, 3)
    for rank in run_two(small("--output", "run"), tmp_path, [None, fault]):
        assert rank.error_line() == (
            "rank 1: out of memory at step 3 with a batch size of 8 a process; use a smaller one, "
            "such as --batch-size 4; the global batch and the result stay the same"
        )
        assert rank.code == 1


def test_out_of_memory_in_an_evaluation_on_one_rank(tmp_path: Path) -> None:
    fault = partial(faults.out_of_memory, 1, training=False)
    for rank in run_two(small("--output", "run"), tmp_path, [None, fault]):
        assert "rank 1: out of memory evaluating 5 images at a time; use a" in rank.error_line()


def test_a_loss_that_is_never_finite(tmp_path: Path) -> None:
    diverge = ("--lr", "1e30", "--warmup-epochs", "0", "--set", "run.max_skipped_steps=3")
    for rank in run_two(small("--output", "run", *diverge), tmp_path):
        line = rank.error_line()
        assert re.match(
            r"diverged at step \d+: the loss was not finite in 3 steps in a row; ", line
        )
        assert "the output of layer1.0.conv1 is not finite" in line
        assert "lower --lr (now 1e+30 at its peak) or lengthen --warmup-epochs" in line
    assert [step["skipped"] for step in events(tmp_path / "run", "step")][-3:] == [True] * 3


def test_a_bug_on_one_rank_is_told_on_the_other(tmp_path: Path) -> None:
    done = run_two(small("--output", "run"), tmp_path, [None, _break])
    assert done[0].error_line().startswith("rank 1: ZeroDivisionError: ")
    assert done[1].code == 1
    assert "Traceback" in done[1].err


def _break() -> None:
    faults.at_micro_batch(2, 1, lambda: 1 // 0)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens, and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_a_port_that_is_in_use(tmp_path: Path, taken_port: int) -> None:
    arguments = small("--output", "run", "--set", "comm.rendezvous_timeout_s=3.0")
    with started_ranks([arguments] * 2, tmp_path, master_port=taken_port) as ranks:
        done = [process.wait(20) for process in ranks]
    line = done[0].error_line()
    assert f"rank 0 cannot host the rendezvous: 127.0.0.1:{taken_port} is in use" in line
    assert "set MASTER_PORT (torchrun: --master-port) to a free port" in line
    assert f"rank 1 did not meet the others at 127.0.0.1:{taken_port} within 3 s" in (
        done[1].error_line()
    )
    assert [rank.code for rank in done] == [1, 1]


def test_a_master_port_that_is_in_use(tmp_path: Path, taken_port: int) -> None:
    launch = ("--nproc-per-node", "2", "--master-port", str(taken_port))
    done = run(small("--output", "run", *launch), tmp_path)
    assert f"cannot listen on 127.0.0.1:{taken_port}" in done.error_line()
    assert "choose a free --master-port, or 0 to have one chosen" in done.error_line()


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--set", "comm.rendezvous_timeout_s=2.0")
    with started_ranks([arguments, ["--version"]], tmp_path) as ranks:
        line = ranks[0].wait(20).error_line()
    assert "rank 1" in line
    assert "within 2 s" in line
