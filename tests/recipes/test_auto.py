"""`recipe = auto`: choices from the data, the device, the time and the user's flags."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import paceline as pl
from cli_runs import Done, run, run_two, summary
from data_sets import png, write_folders
from paceline.cli.train import resolve
from paceline.config import RunConfig, load_config
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.untrusted import parse_toml
from paceline.models import ModelSettings, create_model
from paceline.recipes import nets
from paceline.train.checkpoint import Checkpoint
from paceline.train.choices import Choices, TimeBudget, choices_of, look
from paceline.train.components import Components

QUICK = ["--epochs", "2", "--image-size", "16", "--model", "resnet_tiny", "--set", "run.threads=1",
         "--device", "cpu"]  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cached_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no hub"))


class Pictures(pl.Source):
    """Noise of one size, in memory."""

    def __init__(self, labels: Sequence[int], shape: tuple[int, int, int] = (64, 64, 3)) -> None:
        self.classes, self.labels = [f"c{i}" for i in range(max(labels) + 1)], list(labels)
        self._image = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)

    def read(self, i: int) -> Any:
        return self._image


def write_photos(folder: Path, count: int = 24, classes: int = 2) -> Path:
    """Class folders without a validation set."""
    for i in range(count):
        place = folder / "abcdefgh"[i % classes]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:03d}.png").write_bytes(png(i))
    return folder


def choose(
    source: pl.Source | None = None, ranks: int = 1, **given: Any
) -> tuple[RunConfig, Choices]:
    """The configuration of a run with these settings, `section__key=value`, and its choices."""
    values = {name.replace("__", "."): value for name, value in given.items()}
    values |= {} if source is None else {"data.source": "python"}
    config = load_config("auto", values)
    with look(config, Components(train_data=source), CPU, ranks, 2) as situation:
        choices = choices_of(situation)
    return choices.apply(config), choices


def train(folder: Path, *more: str, fault: Any = None) -> Done:
    return run(["train", "--data-dir", "photos", *more], folder, fault)


def test_own_data_without_a_recipe_has_this_one(tmp_path: Path) -> None:
    own = {"data.dir": str(tmp_path)}
    pending = resolve(None, dict(own), [], chooses=True).run.pending
    assert pending is not None
    assert pending.recipe == "auto"
    assert resolve("quickstart", dict(own), [], chooses=True).run.pending is None
    assert resolve(None, {}, [], chooses=True).run.pending is None
    assert pl.Trainer(data=tmp_path).config.run.pending is not None
    assert pl.Trainer("resnet18", tmp_path).config.run.pending is None
    assert pl.Trainer().config.run.pending is None


def test_it_chooses_all_that_a_run_needs() -> None:
    config, choices = choose(Pictures([i % 6 for i in range(540)]))
    assert config.run.pending is None
    assert config.data.val_split == 0.1
    assert config.data.channels == 3
    assert config.data.image_size <= 1.34 * 64
    assert config.run.global_batch_size is not None
    assert config.run.epochs > 1
    assert config.optim.lr is not None
    assert {"recipe", "auto: model", "auto: epochs", "auto: rate", "auto: more time"} <= set(
        choices.reasons
    )


def test_it_depends_on_the_data() -> None:
    small, _ = choose(Pictures([0, 1] * 20, (40, 30, 1)))
    assert small.data.channels == 1
    assert small.data.image_size <= 40
    assert small.run.global_batch_size is not None
    assert small.run.global_batch_size <= 10
    many, _ = choose(Pictures([i % 10 for i in range(30_000)]))
    assert many.run.global_batch_size == 128
    assert many.data.val_split < 0.1
    assert many.run.epochs < small.run.epochs


@pytest.mark.parametrize(
    "given",
    [
        {"model__name": "resnet50"}, {"data__image_size": 32}, {"run__epochs": 7},
        {"run__global_batch_size": 50}, {"optim__lr": 0.3}, {"optim__name": "adamw"},
        {"data__augment": "none"}, {"data__val_split": 0.3}, {"data__channels": 1},
        {"run__smoothing": 0.0}, {"optim__warmup_epochs": 1.0}, {"run__batch_size": 10},
        {"model__name": "resnet18", "data__image_size": 96},
    ],
)  # fmt: skip
def test_it_never_overwrites_a_flag(given: dict[str, Any]) -> None:
    names = {name.replace("__", ".") for name in given}
    config, choices = choose(Pictures([0, 1, 2] * 100), **given)
    assert not names & choices.values.keys()
    flat = config.flat()
    for name, value in given.items():
        assert flat[name.replace("__", ".")] == value


@pytest.mark.parametrize(
    ("given", "silent"),
    [
        ({"optim__lr": 0.3}, "rate"), ({"optim__name": "adamw", "optim__lr": 0.1}, "rate"),
        ({"data__augment": "none"}, "augmentation"), ({"data__val_split": 0.3}, "validation"),
    ],
)  # fmt: skip
def test_it_gives_no_reason_for_a_value_of_the_user(given: dict[str, Any], silent: str) -> None:
    source = Pictures([0, 1, 2] * 100)
    assert f"auto: {silent}" in choose(source)[1].reasons
    assert f"auto: {silent}" not in choose(source, **given)[1].reasons


def test_a_hint_for_large_images_names_a_command_that_exists(tmp_path: Path) -> None:
    _, choices = choose(Pictures([0, 1] * 4, (16, 2000, 3)))
    hint = choices.reasons["auto: image size"].split("`")[1].split()
    assert hint[0] == "paceline"
    done = run([*hint[1:], "--help"], tmp_path)
    assert done.code == 0, done.err


def test_the_reason_of_the_rate_names_the_schedule_of_the_user() -> None:
    _, choices = choose(Pictures([0, 1] * 100), optim__schedule="constant")
    assert "cosine" not in choices.reasons["auto: rate"]


def test_an_optimizer_of_the_user_keeps_its_own_rate() -> None:
    _, choices = choose(Pictures([0, 1] * 100), optim__name="lars")
    assert not {"optim.lr", "optim.weight_decay", "optim.nesterov"} & choices.values.keys()


def test_it_chooses_the_same_twice_and_divides_the_batch_among_ranks() -> None:
    source = Pictures([0, 1] * 300)
    assert choose(source)[1] == choose(source)[1]
    config, _ = choose(source, ranks=3)
    assert config.run.global_batch_size is not None
    assert config.run.global_batch_size % 3 == 0


def test_a_model_of_the_program_gets_the_other_choices() -> None:
    config = load_config("auto", {"data.source": "python"})
    parts = Components(train_data=Pictures([0, 1] * 50), model=lambda: None)  # type: ignore[arg-type,return-value]
    with look(config, parts, CPU, 1, 2) as situation:
        assert "model.name" not in choices_of(situation).values


def test_more_time_means_a_larger_network_and_more_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Pictures([i % 6 for i in range(3000)])

    def speed(situation: Any, values: dict[str, Any], classes: int) -> nets.Speed:
        cost = {"resnet_tiny": 1.0, "resnet18": 4.0}[values["model.name"]]
        return nets.Speed(2e4 / values["data.image_size"] / cost, "measured")

    monkeypatch.setattr("paceline.recipes.auto.measured_speed", speed)
    costs = []
    for minutes in (1, 4, 16, 64):
        config, _ = choose(source, run__minutes=minutes)
        assert config.run.minutes is None
        size = config.data.image_size * (4 if config.model.name == "resnet18" else 1)
        costs.append((size, config.run.epochs * size))
    assert costs == sorted(costs)
    assert costs[0][0] < costs[-1][0]
    with pytest.raises(ConfigError, match="--minutes") as caught:
        choose(source, run__minutes=0.1)
    assert caught.value.field == "run.minutes"


def test_time_and_epochs_exclude_each_other() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("auto", {"run.minutes": 3, "run.epochs": 2})
    assert caught.value.field == "run.minutes"


def test_a_step_is_measured() -> None:
    # On a busy host, the steps of two threads are slow.
    config, choices = choose(Pictures([0, 1] * 20), run__minutes=60.0)
    assert "measured" in choices.reasons["auto: model"]
    assert config.run.epochs >= 2


# Weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "photos18.safetensors"
    model = create_model(ModelSettings(name="resnet18", stem="imagenet"), num_classes=7)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return path


def test_a_file_decides_the_model(weights: Path) -> None:
    config, choices = choose(Pictures([0, 1] * 100, (64, 64, 1)), run__pretrained=str(weights))
    assert (config.model.name, config.model.stem, config.data.channels) == (
        "resnet18",
        "imagenet",
        3,
    )
    assert "auto: pretrained" in choices.reasons


def test_a_file_that_fits_no_model_is_one_line(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(PacelineError, match="--model"):
        choose(Pictures([0, 1] * 100), run__pretrained=str(tmp_path / "w.safetensors"))


def test_weights_in_the_cache_of_timm_are_used(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "hub" / "models--timm--resnet18.a1_in1k" / "snapshots" / "1234"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(weights.read_bytes())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for given in ({}, {"run__pretrained": "timm"}):
        config, _ = choose(Pictures([0, 1] * 100), **given)
        assert config.run.pretrained == str(place / "model.safetensors")
        assert config.model.name == "resnet18"


def test_nothing_is_downloaded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("paceline.recipes.weights._download", partial(pytest.fail, "a download"))
    assert choose(Pictures([0, 1] * 100))[0].run.pretrained == ""


# Bad input: one line that says what to do, before training starts


def test_one_class(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", classes=1)
    assert "two" in train(tmp_path).error_line()
    with pytest.raises(DataError, match="two classes"):
        choose(Pictures([0] * 20))


def test_two_images(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", count=2)
    line = train(tmp_path).error_line()
    assert "2 images" in line
    assert "add images" in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_thousands_of_classes_with_few_images() -> None:
    with pytest.raises(DataError, match="merge classes"):
        choose(Pictures(list(range(20_000)) * 2))
    config, _ = choose(Pictures(list(range(2_000)) * 6))
    assert config.run.epochs > 1


def test_sizes_from_10_to_10000_pixels(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos")
    for name, side in (("a/tiny.png", 10), ("b/huge.png", 10_000)):
        Image.new("L", (side, side)).save(folder / name)
    stream = io.BytesIO()
    Image.new("RGB", (10_000, 60)).save(stream, "JPEG")
    (folder / "a" / "long.jpg").write_bytes(stream.getvalue())
    done = train(tmp_path, *QUICK)
    assert done.code == 0, done.err
    assert "10 to 10000" in done.out.replace(",", "")
    assert "--short-side" not in done.out  # the image size was given, and needs no hint
    config = load_config("auto", {"data.dir": str(folder)})
    with look(config, Components(), CPU, 1, 2) as situation:
        assert "--short-side" in choices_of(situation).reasons["auto: image size"]


def test_unreadable_images(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"no image")
    assert "convert" in train(tmp_path).error_line()


def test_a_time_that_cannot_be_met(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    line = train(tmp_path, "--minutes", "0.001").error_line()
    assert "run.minutes" in line
    assert "give --minutes" in line


@pytest.mark.parametrize("command", [["lr-find"], ["rehearse", "--nodes", "2"], ["tune"]])
def test_only_train_takes_this_recipe(command: list[str], tmp_path: Path) -> None:
    line = run([command[0], "auto", *command[1:], "--data-dir", "photos"], tmp_path).error_line()
    assert "config.toml" in line


def test_time_without_this_recipe(tmp_path: Path) -> None:
    line = run(["train", "quickstart", "--minutes", "3"], tmp_path).error_line()
    assert "recipe auto" in line


# Runs


def settings_of(run_folder: Path) -> dict[str, Any]:
    return parse_toml((run_folder / "config.toml").read_bytes())


def test_a_run_writes_its_choices_and_config_toml_repeats_it(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    done = train(tmp_path, *QUICK, "--output", "one")
    assert done.code == 0, done.err
    assert "auto: rate" in done.out
    written = settings_of(tmp_path / "one")
    assert written["optim"]["lr"] > 0
    assert written["data"]["val_split"] == 0.1
    assert "minutes" not in written["run"]
    again = run(["train", "one/config.toml", "--data-dir", "photos", "--output", "two"], tmp_path)
    assert again.code == 0, again.err
    assert (
        summary(tmp_path / "one")["weights_sha256"] == summary(tmp_path / "two")["weights_sha256"]
    )


def test_a_dry_run_shows_the_choices(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    done = train(tmp_path, *QUICK, "--dry-run")
    assert done.code == 0, done.err
    assert "auto: rate" in done.out


def correct(epochs: int) -> None:
    """The first epoch's time always leads to this number of epochs."""

    def fixed(*_: object) -> int:
        return epochs

    TimeBudget.epochs = fixed  # type: ignore[method-assign]


def stop_at(epochs: int, step: int) -> None:
    """The same, and the run ends after a step as if by a signal."""
    import os
    import signal

    from paceline.train.step_records import StepRecords

    correct(epochs)
    add = StepRecords.add

    def add_and_stop(self: StepRecords, outcome: Any, train_s: float) -> None:
        add(self, outcome, train_s)
        if outcome.number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)

    StepRecords.add = add_and_stop  # type: ignore[method-assign]


TIMED = ["--minutes", "5", *QUICK[2:], "--set", "run.eval_interval_epochs=2"]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timed")
    write_photos(folder / "photos")
    done = train(folder, *TIMED, "--output", "whole", fault=partial(correct, 4))
    assert done.code == 0, done.err
    assert "in 4 epochs, corrected" in done.out
    return folder


def test_the_correction_is_written_and_pinned(timed: Path) -> None:
    whole = summary(timed / "whole")
    assert whole["epochs"] == 4
    assert settings_of(timed / "whole")["run"]["epochs"] == 4
    newest = sorted((timed / "whole" / "checkpoints").glob("step-*.pt"))[-1]
    assert Checkpoint.read(newest).config["run"]["epochs"] == 4
    events = [json.loads(line) for line in (timed / "whole/metrics.jsonl").read_text().splitlines()]
    (length,) = [event for event in events if event["event"] == "length"]
    assert length["total_steps"] == whole["steps"]
    assert next(event["epoch"] for event in events if event["event"] == "eval") < 2


@pytest.mark.parametrize("step", [2, 7])
def test_a_stopped_run_resumes_to_the_same_bits(timed: Path, step: int) -> None:
    """Before the correction (an epoch has three steps) and after it."""
    name = f"stopped{step}"
    stopped = train(timed, *TIMED, "--output", name, fault=partial(stop_at, 4, step))
    assert stopped.code == 143, stopped.err
    # After the correction, another time changes nothing.
    other = 4 if step < 3 else 9
    more = train(timed, *TIMED, "--output", name, "--resume", "auto", fault=partial(correct, other))
    assert more.code == 0, more.err
    assert summary(timed / name)["weights_sha256"] == summary(timed / "whole")["weights_sha256"]
    assert summary(timed / name)["epochs"] == 4


def test_two_ranks_make_the_same_choices(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", count=40)
    arguments = ["train", "--data-dir", "photos", *TIMED, "--output", "run"]
    # Rank 0 decides: the other rank would choose another length.
    faults = [partial(correct, 3), partial(correct, 8)]
    for done in run_two(arguments, tmp_path, faults):
        assert done.code == 0, done.err
    assert summary(tmp_path / "run")["epochs"] == 3


def test_the_length_follows_from_the_measured_times() -> None:
    plan = pl_plan(samples=100, batch=10)
    run_settings = RunConfig().run
    slow_start = [9.0, 9.0, *[1.0] * 8]
    # 10 s per epoch and 2 s per evaluation: (0.95 · 80 - 2 - 3) / 12 = 5 more epochs.
    assert TimeBudget(100.0).epochs(20.0, slow_start, 2.0, plan, run_settings) == 6
    assert TimeBudget(10.0).epochs(20.0, slow_start, 2.0, plan, run_settings) == 2


def pl_plan(samples: int, batch: int) -> Any:
    from paceline.data import BatchPlan

    return BatchPlan(samples, 5, batch, batch, 1)


def test_the_trainer_chooses_for_own_data(tmp_path: Path) -> None:
    write_folders(tmp_path / "set")
    settings = {"run.threads": 1, "run.device": "cpu", "data.image_size": 16}
    trainer = pl.Trainer(
        data=tmp_path / "set", epochs=1, output=tmp_path / "run", settings=settings
    )
    result = trainer.fit()
    assert result.top1 is not None
    assert settings_of(tmp_path / "run")["optim"]["nesterov"] is True
    # The run's settings, not the defaults, prepare the image.
    assert trainer.predict([tmp_path / "set/val/a/1000.png"])[0].label in "abcd"
