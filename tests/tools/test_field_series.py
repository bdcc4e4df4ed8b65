"""The series of the comparison, at a tiny scale on the CPU."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import field_series as tool
from paceline.config import RunConfig, load_config
from paceline.core.errors import ConfigError, DivergedError
from paceline.report import Comparison, read_runs
from paceline.train.loop import RunResult
from paceline.train.run import RunOutcome

TINY = [
    "--model", "resnet_tiny", "--batches", "256",
    *(word for text in (
        "data.source=synthetic", "data.synthetic_samples=64", "data.synthetic_classes=4",
        "data.image_size=28", "data.channels=1", "data.mean=[0.5]", "data.std=[0.25]",
        "model.stem=auto", "model.num_classes=4", "run.epochs=1", "run.device=cpu", "run.threads=1",
        "run.global_batch_size=16", "run.batch_size=16", "data.workers=1",
    ) for word in ("--set", text)),
]  # fmt: skip


def test_every_planned_run_has_valid_settings() -> None:
    names = set()
    for option in tool.OPTIONS:
        for batch in option.middles:
            for factor in tool.FACTORS:
                planned = tool.Planned(option, batch, option.middles[batch] * factor, 0)
                config = load_config("cifar10-resnet18", planned.settings())
                first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
                unit = config.run.batch_size
                assert first % unit == 0
                config.optim.batch_growth.after(
                    first, unit, config.optim.decay_epochs, config.optim.batch_limit
                )
                names.add(planned.name)
    assert len(names) == sum(3 * len(option.middles) for option in tool.OPTIONS)
    # The rows of growth and of its baseline differ in the growth alone.
    grows, stays = (next(o for o in tool.OPTIONS if o.name == n) for n in ("growth", "no-growth"))
    for batch in tool.ENDS:
        baseline = stays.at(batch)
        more = {key for key, value in grows.at(batch).items() if baseline.get(key) != value}
        assert more == {"optim.batch_schedule", "optim.batch_limit"}


def test_a_series_tunes_trains_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path / "out"), *TINY, "--only", "sgd"]
    assert tool.main([*command, "--seconds", "0"]) == 3, "no time at all"
    assert not (tmp_path / "out/sgd-b256-0.067-s0").exists()
    assert tool.main(command) == 0
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert len(folders) == 5, "three values with seed 0, the best with seeds 1 and 2"
    log = (tmp_path / "out/tuning.md").read_text().splitlines()
    assert log[2].startswith("| sgd | 256 | `optim.lr` | 0.067 → ")
    compare = (tmp_path / "out/compare.sh").read_text()
    assert compare.count("-s0") == compare.count("-s1") == compare.count("-s2") == 1
    capsys.readouterr()
    summary = tmp_path / "out" / folders[0] / "summary.json"
    changed = summary.stat().st_mtime_ns
    assert tool.main(command) == 0
    assert capsys.readouterr().out == "", "everything was done"
    assert summary.stat().st_mtime_ns == changed
    assert json.loads(summary.read_text())["state_bytes_per_parameter"] == pytest.approx(4, abs=0.1)
    left = {path.name for path in summary.parent.iterdir()}
    assert not {"checkpoints", "weights.safetensors", "report.html"} & left
    rows = Comparison.of(read_runs([tmp_path / "out"])).rows
    assert sorted(len(row.runs) for row in rows) == [1, 1, 3], "compared without them"


class FakeTraining:
    """Takes the place of `run_training`. `raises` by the name of a run; a signal is an outcome."""

    def __init__(self) -> None:
        self.raises: dict[str, Exception | signal.Signals] = {}
        self.tried: list[str] = []

    def __call__(self, config: RunConfig, *_: object) -> RunOutcome:
        folder = Path(config.run.output)
        self.tried.append(folder.name)
        end = self.raises.get(folder.name)
        if isinstance(end, signal.Signals):
            return RunOutcome(folder, 0, RunResult(end.name, end), {}, None)
        if isinstance(end, ConfigError):
            raise end  # no folder yet
        folder.mkdir(parents=True)
        if end is not None:
            raise end
        rate = config.optim.lr
        assert rate is not None
        summary = {"top1": 50 - rate, "images_per_s": 1.0, "state_bytes_per_parameter": 4.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        return RunOutcome(folder, 0, RunResult("finished", None), summary, None)

    def count(self) -> Counter[str]:
        found = Counter(name.partition("-")[0] for name in self.tried)
        self.tried.clear()
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    made = FakeTraining()
    monkeypatch.setattr(tool, "run_training", made)
    return made


def test_a_run_that_diverged_is_done_and_one_that_failed_is_tried_again(
    tmp_path: Path, fake: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.raises = {
        "sgd-b256-0.067-s0": DivergedError("diverged at step 3"),
        "nesterov-b256-0.2-s0": ConfigError("optim.nesterov", True, "cannot be used"),
        "lars-b256-0.27-s0": RuntimeError("a bug"),
    }
    command = [str(tmp_path), *TINY, "--only"]
    assert [tool.main([*command, name]) for name in ("sgd", "nesterov", "lars")] == [0, 1, 1]
    # The best of the two values of sgd has all seeds. No value is the best where a try failed.
    assert fake.count() == {"sgd": 5, "nesterov": 3, "lars": 3}
    assert "Traceback" in capsys.readouterr().err, "of the bug"
    assert (tmp_path / "sgd-b256-0.067-s0/failed.txt").read_text() == "diverged at step 3\n"
    assert "0.067 → diverged" in _tuning(tmp_path, "sgd")
    fake.raises = {}
    (tmp_path / "lars-b256-0.27-s0").rmdir()  # the folder that the fake would make again
    fake.count()
    assert [tool.main([*command, name]) for name in ("sgd", "nesterov", "lars")] == [0, 0, 0]
    assert fake.count() == {"nesterov": 3, "lars": 3}, "the failed tries, and two more seeds each"


def _tuning(out: Path, only: str) -> str:
    assert tool.main([str(out), *TINY, "--only", only]) == 0
    return (out / "tuning.md").read_text()


def test_a_signal_ends_the_series_and_the_next_command_continues(
    tmp_path: Path, fake: FakeTraining
) -> None:
    command = [str(tmp_path), *TINY, "--only", "sgd"]
    fake.raises = {"sgd-b256-0.2-s0": signal.SIGTERM}
    assert tool.main(command) == 3
    assert fake.count() == {"sgd": 2}, "nothing begins after the signal"
    fake.raises = {}
    assert tool.main(command) == 0
    assert fake.count() == {"sgd": 4}


def test_a_wrong_data_folder_ends_the_series_and_marks_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nothing"
    assert tool.main([str(tmp_path / "out"), "--data-dir", str(missing), "--only", "sgd"]) == 1
    assert str(missing) in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*/failed.txt"))


@pytest.mark.slow
def test_every_option_trains_at_a_tiny_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows with all their settings but smaller batches, one value and one seed."""
    sizes = {256: 16, 500: 4, 1000: 8, 2500: 20, 4096: 256, 10_000: 80}
    settings = tool.Planned.settings

    def smaller(planned: Any) -> dict[str, Any]:
        scaled = ("run.global_batch_size", "run.batch_size", "optim.batch_limit")
        found = settings(planned).items()
        return {key: sizes[value] if key in scaled else value for key, value in found}

    monkeypatch.setattr(tool.Planned, "settings", smaller)
    monkeypatch.setattr(tool, "FACTORS", (1.0,))
    monkeypatch.setattr(tool, "SEEDS", (0,))
    kept = [text for text in TINY if "batch" not in text and text not in ("256", "run.epochs=1")]
    words = [text for text in kept if text != "--set"]
    command = words[:2] + [word for text in words[2:] for word in ("--set", text)]
    assert tool.main([str(tmp_path / "out"), *command]) == 0
    rows = sum(len(option.middles) for option in tool.OPTIONS)
    assert len(list((tmp_path / "out").glob("*/summary.json"))) == rows
    assert len((tmp_path / "out/tuning.md").read_text().splitlines()) == 2 + rows


def test_the_list_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["out", "--list", "--only", "one-cycle*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2 * 3


def test_processes_share_the_rows(
    tmp_path: Path, fake: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    (claims / "sgd-b256").touch()  # of another process
    command = [str(tmp_path / "out"), *TINY, "--only", "*s*g*", "--claims", str(claims)]
    assert tool.main(command) == 3, "the other process has not trained its row"
    assert "sgd-b256: not complete" in capsys.readouterr().out
    assert fake.count()["sgd"] == 5, "the row sgd-fixed alone"
    assert not list((tmp_path / "out").glob("sgd-b256-*"))
    assert tool.main(command) == 3
    assert not fake.tried, "each row is claimed"
    (claims / "sgd-b256").unlink()
    assert tool.main(command) == 0
    assert fake.count() == {"sgd": 5}


@pytest.mark.parametrize(
    ("end", "code"), [(signal.SIGTERM, 3), (ConfigError("optim.lr", 1, "cannot be used"), 1)]
)
def test_a_row_that_is_not_complete_is_no_longer_claimed(
    tmp_path: Path, fake: FakeTraining, end: Exception | signal.Signals, code: int
) -> None:
    claims = tmp_path / "claims"
    command = [str(tmp_path / "out"), *TINY, "--only", "sgd", "--claims", str(claims)]
    assert tool.main([*command, "--seconds", "0"]) == 3
    assert not list(claims.iterdir())
    fake.raises = {"sgd-b256-0.2-s0": end}
    assert tool.main(command) == code
    assert not list(claims.iterdir())
    fake.raises = {}
    assert tool.main(command) == 0
    assert [path.name for path in claims.iterdir()] == ["sgd-b256"]


def test_steps_are_timed_once(
    tmp_path: Path, fake: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path), *TINY, "--only", "*s*g*", "--speed"]
    assert tool.main([*command, "--seconds", "-1"]) == 3
    fake.raises = {"sgd-b256-0.2-s0": signal.SIGINT}
    assert tool.main(command) == 3
    assert fake.tried == ["sgd-b256-0.2-s0"], "nothing begins after the signal"
    assert not (tmp_path / "speed.jsonl").exists()
    fake.raises = {}
    fake.tried.clear()
    assert tool.main(command) == 0
    # Of the names that match, growth and its baseline are no optimizers.
    assert fake.tried == ["sgd-b256-0.2-s0", "sgd-fixed-b256-0.2-s0", "svrg-b256-0.2-s0"]
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["option"] for line in lines] == ["sgd", "sgd-fixed", "svrg"]
    fake.tried.clear()
    assert tool.main(command) == 0
    assert not fake.tried
    assert not (tmp_path / "tuning.md").exists()
