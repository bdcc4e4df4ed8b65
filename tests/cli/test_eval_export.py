"""`paceline eval` and `paceline export` on checkpoints of one rank and of two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cli_runs import Call, events, run, run_two, small_on, summary
from data_sets import write_folders, write_shards
from paceline.train.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data`, and the finished runs `run` on one rank and `two` on two, which evaluates mirror images."""
    folder = tmp_path_factory.mktemp("home")
    write_shards(folder / "data", train=64, val=37)
    more = ("--epochs", "3", "--set", "checkpoint.keep=9")
    assert run(small_on("data", "--output", "run", *more), folder).code == 0
    more = (*more, "--set", "data.eval_flip=true")
    assert run_two(small_on("data", "--output", "two", *more), folder)[0].code == 0
    return folder


def evaluated(call: Call, *arguments: str) -> dict[str, Any]:
    done = call("eval", *arguments, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1, "one line of JSON and nothing else"
    return dict(json.loads(done.out))


@pytest.fixture(autouse=True)
def _at_home(call: Call, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of `home`; after `call`, which goes elsewhere."""
    monkeypatch.chdir(home)


@pytest.mark.parametrize("name", ["run", "two"])
def test_a_checkpoint_scores_as_in_the_run(call: Call, home: Path, name: str) -> None:
    """Also one of two ranks, whose batch-norm statistics are averaged from the file."""
    recorded = {event["step"]: event for event in events(home / name, "eval")}
    assert sorted(recorded) == [8, 16, 24]
    for step, event in recorded.items():
        found = evaluated(call, f"{name}/checkpoints/step-{step:08d}.pt")
        assert (found["top1"], found["top5"]) == (event["top1"], event["top5"])
        assert found["loss"] == pytest.approx(event["loss"], rel=1e-5)
        assert (found["samples"], found["corrupt_samples"]) == (37, 0)


def test_mirror_images_are_evaluated_where_the_run_did(call: Call) -> None:
    own = evaluated(call, "two")["loss"]
    assert own != pytest.approx(evaluated(call, "two", "--set", "data.eval_flip=false")["loss"])
    done = call("export", "two", "flip.safetensors")
    assert done.code == 0, done.err
    with safe_open("flip.safetensors", "pt") as file:
        assert file.metadata()["eval_flip"] == "true"


def test_an_override_replaces_a_value_that_this_version_does_not_have(
    call: Call, home: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.read(home / "run/checkpoints/best.pt")
    data = {**checkpoint.config["data"], "decoder": "dali"}
    old = tmp_path / "old.pt"
    replace(checkpoint, config={**checkpoint.config, "data": data}).write(old)
    assert "data.decoder = 'dali'" in call("eval", str(old)).error_line()
    evaluated(call, str(old), "--set", "data.decoder=pillow")
    assert "--set = 'model.name'" in call("eval", str(old), "--set", "model.name=x").error_line()


def test_a_validation_split_that_lacks_classes_keeps_their_numbers(
    call: Call, home: Path, tmp_path: Path
) -> None:
    """Without `classes.json` and without training images, the checkpoint defines the labels."""
    write_shards(tmp_path / "few", train=4, val=12, labels=lambda i: 1)
    for name in ("classes.json", "train-0.tar", "train-1.tar"):
        (tmp_path / "few" / name).unlink()
    assert evaluated(call, "run", "--data-dir", str(tmp_path / "few"))["samples"] == 12


def test_corrupt_images_are_left_out_and_named(call: Call, home: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "bad", train=4, val=8, corrupt={1002})
    data = ("--data-dir", str(tmp_path / "bad"))
    found = evaluated(call, "run", *data)
    assert (found["samples"], found["corrupt_samples"]) == (7, 1)
    assert "corrupt, left out: val-0.tar:1002.png (" in call("eval", "run", *data).out
    # Also where a whole batch is corrupt, and the last one at that.
    write_shards(tmp_path / "last", train=4, val=7, corrupt={1006})
    found = evaluated(call, "run", "--data-dir", str(tmp_path / "last"), "-b", "3")
    assert (found["samples"], found["corrupt_samples"]) == (6, 1)


def test_evaluating_on_two_ranks_counts_each_image_once(home: Path) -> None:
    done = run_two(["eval", "run", "--device", "cpu", "--json"], home)
    assert [rank.code for rank in done] == [0, 0]
    found = json.loads(done[0].out)
    assert (found["top1"], found["samples"]) == (summary(home / "run")["best_top1"], 37)
    assert done[1].out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("eval run --data-dir nowhere", "nowhere"),
        ("eval run --data-dir folders", "folders/val/a"),
        ("eval run --data-dir other", "'eel'"),
        ("eval run --data-dir many", "5 classes"),
        ("eval data", "data/checkpoints"),
        ("eval run/weights.safetensors", "run/weights.safetensors"),
        ("export nowhere.pt out.safetensors", "nowhere.pt"),
        ("export run data/val-0.tar/x.safetensors", "data/val-0.tar/x.safetensors"),
    ],
)
def test_mistakes_are_one_line(call: Call, home: Path, arguments: str, words: str) -> None:
    if not (home / "many").exists():
        write_folders(home / "folders", train=4)
        write_shards(home / "many", train=4)
        (home / "many/classes.json").write_text(json.dumps(["ant", "bee", "cat", "dog", "eel"]))
        write_shards(home / "other", train=4)
        (home / "other/classes.json").write_text(json.dumps(["ant", "bee", "cat", "eel"]))
    assert words in call(*arguments.split()).error_line()


@pytest.mark.parametrize("name", ["run", "two"])
def test_the_last_checkpoint_exports_to_the_weights_of_the_run(
    call: Call, home: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "deep/last.safetensors"
    done = call("export", f"{name}/checkpoints/step-00000024.pt", str(out))
    assert done.code == 0, done.err
    exported, written = load_file(out), load_file(home / name / "weights.safetensors")
    assert exported.keys() == written.keys()
    for key, value in exported.items():
        assert torch.equal(value, written[key]), key
    files = (out, home / name / "weights.safetensors")
    first, second = (safe_open(file, "pt").metadata() for file in files)
    assert first == second
    assert (first["model"], first["step"], first["image_size"]) == ("resnet_tiny", "24", "28")
