"""`pl.Checkpointer`: bit-exact resume of an own loop, kills during a save, damaged folders."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from custom_loop.nets import batch, make_net
from faults import at_rename
from fork_server import Child, Request, shared_server
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.train.checkpoint import content_hash
from ranks import run_ranks


class Position:
    """A loader's: how many batches it has given, and a draw of its own generator."""

    def __init__(self, rank: int) -> None:
        self.rank, self.given, self.draws = rank, 0, np.zeros(3)

    def __next__(self) -> Any:
        self.given += 1
        self.draws = np.random.rand(3)
        return batch(self.rank, self.given)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "draws": self.draws, "last": self.draws[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.draws = state["given"], state["draws"]
        assert type(state["last"]) is np.float64


def _loop(rank: int, folder: Path, stop: int, total: int = 6) -> dict[str, str]:
    """Trains to step `stop` of `total` from wherever the folder is, and saves there."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    with pl.init(device="cpu", timeout_s=120):
        prepared = pl.prepare(make_net(rank, dropout=0.5), "lars", lr=0.5, precision="bf16")
        model, loader = pl.DataParallel(prepared.model), Position(rank)
        torch.manual_seed(10 + rank)
        schedule = torch.optim.lr_scheduler.MultiStepLR(prepared.optimizer, [2, 4])
        checkpointer = pl.Checkpointer(folder)
        start = checkpointer.restore(prepared=prepared, loader=loader, schedule=schedule)
        draw = checkpointer.extra.get("draw", 0.0)
        for _ in range(start or 0, stop):
            images, labels = next(loader)
            with prepared.autocast():
                loss = F.cross_entropy(model(images).float(), labels)
            prepared.backward(loss)
            prepared.step()
            schedule.step()
            draw = random.random()
        checkpointer.save(
            stop, prepared=prepared, loader=loader, schedule=schedule, extra={"draw": draw}
        )
        state = prepared.state_dict()
        state["optimizer"] = state["optimizer"]["state"]
        return {
            "weights": content_hash(state),
            "loader": content_hash(loader.draws.tolist()),
            "random": content_hash([random.getstate(), torch.get_rng_state(), draw]),
            "lr": str(prepared.lr),
            "start": str(start),
            "statistics": content_hash(dict(prepared.model.named_buffers())),
        }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_loop_has_the_bits_of_an_uninterrupted_one(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(ranks, _loop, tmp_path / "a", 6)
    for stop in (2, 3, 6):
        parts = run_ranks(ranks, _loop, tmp_path / "b", stop)
    for resumed, straight in zip(parts, whole, strict=True):
        assert (straight.pop("start"), resumed.pop("start")) == ("None", "3")
        assert resumed == straight
    if ranks == 2:
        # Each rank has statistics of its own; what is equal is stored once.
        assert whole[0]["statistics"] != whole[1]["statistics"]
        (first, second) = sorted((tmp_path / "a/step-00000006").glob("rank-*.pt"))
        assert "shared" in str(torch.load(second, weights_only=True))
        assert "shared" not in str(torch.load(first, weights_only=True))


def _killed_save(folder: Path, moment: str) -> None:
    net = make_net(1)
    if moment == "rename":
        at_rename("step-00000002", 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        real, calls = os.fsync, [0]

        def fsync(descriptor: int) -> None:
            calls[0] += 1
            if calls[0] == 2:  # the manifest
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor)

        os.fsync = fsync
    pl.Checkpointer(folder, keep=1).save(2, model=net)


@pytest.mark.parametrize("moment", ["rename", "write"])
def test_a_killed_save_leaves_the_last_good_one(moment: str, tmp_path: Path) -> None:
    net = make_net()
    checkpointer = pl.Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, model=net)
    fault = pickle.dumps(functools.partial(_killed_save, tmp_path, moment))
    child = Child(shared_server().start(Request("saving", [], dict(os.environ), fault=fault)))
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"]
    assert len(list(tmp_path.glob(".step-*.tmp"))) == 1
    other = make_net(3)
    assert checkpointer.restore(model=other) == 1
    assert content_hash(other.state_dict()) == content_hash(net.state_dict())
    checkpointer.save(2, model=net)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_damaged_ones_are_skipped_with_a_note(tmp_path: Path) -> None:
    net, checkpointer = make_net(), pl.Checkpointer(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, model=net)
    content = (tmp_path / "step-00000004/rank-0.pt").read_bytes()
    (tmp_path / "step-00000004/rank-0.pt").write_bytes(content[:-1] + b"x")
    (tmp_path / "step-00000003/manifest.json").write_text("{}")
    (tmp_path / "step-00000002/rank-0.pt").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpointer.restore(model=net) == 1
    assert [note.split("/")[-1][:13] for note in checkpointer.notes] == [
        "step-00000004", "step-00000003", "step-00000002",
    ]  # fmt: skip
    # The damaged ones do not count as newer than what is saved next.
    checkpointer.save(2, model=net)
    assert checkpointer.restore(model=net) == 2
    assert checkpointer.notes == []
    (tmp_path / "step-00000001/manifest.json").unlink()
    for path in tmp_path.glob("step-00000002*/rank-0.pt"):
        path.unlink()
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(CheckpointError, match="are damaged"),
    ):
        checkpointer.restore(model=net)


def test_the_last_ones_are_kept_and_abandoned_ones_set_aside(tmp_path: Path) -> None:
    net, checkpointer = make_net(), pl.Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        checkpointer.save(step, model=net)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000003.2"]
    checkpointer.save(1, model=net)  # begins again
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001", "step-00000003.2.abandoned", "step-00000003.abandoned",
    ]  # fmt: skip
    assert checkpointer.restore(model=net) == 1


def _save_or_restore(rank: int, folder: Path, what: str) -> str:
    with pl.init(device="cpu", timeout_s=120):
        checkpointer = pl.Checkpointer(folder)
        try:
            if what == "save":
                checkpointer.save(1, model=make_net())
            elif what == "other step":
                checkpointer.save(1 + rank, model=make_net())
            elif what == "full disk":
                if rank == 1:
                    _full_disk()
                checkpointer.save(2, model=make_net())
            else:
                checkpointer.restore(model=make_net())
        except PacelineError as error:
            return str(error)
        finally:
            os.fsync = REAL_FSYNC
    return ""


REAL_FSYNC = os.fsync


def _full_disk() -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    os.fsync = fsync


def test_ranks_fail_alike_and_keep_the_last_good_one(tmp_path: Path) -> None:
    assert run_ranks(2, _save_or_restore, tmp_path, "save") == ["", ""]
    for what, words in (("other step", "ranks differ in step"), ("full disk", "No space left")):
        for text in run_ranks(2, _save_or_restore, tmp_path, what):
            assert words in text
            assert "\n" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    for text in run_ranks(3, _save_or_restore, tmp_path, "restore"):
        assert "was saved on 2 ranks, but this job has 3" in text


class Pair:
    """Two tensors that are equal when they are saved."""

    def __init__(self) -> None:
        self.left, self.right = torch.zeros(2), torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _equal_tensors(rank: int, folder: Path) -> list[float]:
    with pl.init(device="cpu", timeout_s=120):
        checkpointer, pair = pl.Checkpointer(folder), Pair()
        checkpointer.save(1, pair=pair)
        checkpointer.restore(pair=pair)
        pair.left += 1 + rank
        return [*pair.left.tolist(), *pair.right.tolist()]


def test_equal_tensors_do_not_share_memory_after_a_restore(tmp_path: Path) -> None:
    assert run_ranks(2, _equal_tensors, tmp_path) == [[1, 1, 0, 0], [2, 2, 0, 0]]


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    net, checkpointer = make_net(), pl.Checkpointer(tmp_path)
    checkpointer.save(1, model=net)
    seen: list[Any] = []
    net.register_load_state_dict_pre_hook(lambda *given: seen.append(given[3]))
    checkpointer.restore(model=net)
    assert seen == [{"version": 1}]


class Drawing:
    """Its state dict draws random numbers, as that of a loader that shuffles its next epoch."""

    def state_dict(self) -> Any:
        return {"seed": random.random() + float(np.random.rand()) + float(torch.rand(()))}

    def load_state_dict(self, state: Any) -> None: ...


def test_random_states_are_those_before_the_state_dicts(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        for start in (torch.manual_seed, np.random.seed, random.seed):
            start(7)

    checkpointer = pl.Checkpointer(tmp_path)
    seed()
    checkpointer.save(1, loader=Drawing())
    draws()
    assert checkpointer.restore(loader=Drawing()) == 1
    restored = draws()
    seed()
    assert restored == draws()


class Odd:
    def state_dict(self) -> Any:
        return {"when": [Path("x")]}

    def load_state_dict(self, state: Any) -> None: ...


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    checkpointer = pl.Checkpointer(tmp_path)
    net = make_net()
    assert checkpointer.restore(model=net) is None
    with pytest.raises(CheckpointError, match=r"odd\.when\[0\] .* executing code"):
        checkpointer.save(1, odd=Odd())
    with pytest.raises(ConfigError, match="loader"):
        checkpointer.save(1, loader=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep"):
        pl.Checkpointer(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())
    checkpointer.save(1, model=net)
    with pytest.raises(
        CheckpointError, match="contains model, but the call names model, optimizer"
    ):
        checkpointer.restore(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    assert checkpointer.restore(model=None) == 1
    with pytest.raises(CheckpointError, match="model does not fit"):
        checkpointer.restore(model=torch.nn.Linear(2, 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        pl.Checkpointer(tmp_path / "file").save(1, model=net)


def test_files_execute_nothing(tmp_path: Path) -> None:
    """A foreign file with a right hash is damaged, not run."""
    net, checkpointer = make_net(), pl.Checkpointer(tmp_path)
    folder = checkpointer.save(1, model=net)
    torch.save({"random": Odd()}, folder / "rank-0.pt")
    content = (folder / "rank-0.pt").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["rank-0.pt"] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(CheckpointError, match="cannot be read"),
    ):
        checkpointer.restore(model=net)
