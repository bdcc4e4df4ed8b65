"""W&B and MLflow themselves, without a network: offline modes, and servers that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import events, summary
from paceline.trackers.clients import WandbTracker
from ranks import free_port
from small_runs import losses, run_small

pytestmark = [
    pytest.mark.trackers, pytest.mark.timeout(300),
    # Of libraries that are not ours.
    pytest.mark.filterwarnings("ignore"),
]  # fmt: skip


def notes(folder: Path) -> list[str]:
    return [e["text"] for e in events(folder, "note") if "tracker" in e["text"]]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_small(tmp_path / "run", run__trackers=["wandb"])
    assert notes(tmp_path / "run") == []
    (stored,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    for name in (b"train/loss", b"val/top1", b"optim"):
        assert name in content


def test_wandb_keeps_what_arrives_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, {})
    tracker.log(5, {"train/loss": 1.0})
    tracker.log(4, {"checkpoint/save_s": 2.0})
    tracker.log(6, {"train/loss": 0.5})
    tracker.close()
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = stored.read_bytes()
    for name in (b"train/loss", b"checkpoint/save_s"):
        assert name in content


def test_wandb_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = run_small(tmp_path / "run", run__trackers=["wandb"])
    assert outcome.summary["steps"] == 7
    assert len(notes(tmp_path / "run")) == 1


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_small(tmp_path / "run", run__trackers=["mlflow"])
    assert notes(tmp_path / "run") == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "run/mlruns").as_uri())
    experiment = client.get_experiment_by_name("paceline")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.value for metric in history] == losses(tmp_path / "run")
    assert found.data.params["model.name"] == "resnet_tiny"


def test_mlflow_whose_server_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outcome = run_small(tmp_path / "run", run__trackers=["mlflow"])
    assert outcome.summary["steps"] == 7
    (note,) = notes(tmp_path / "run")
    assert "mlflow" in note
    assert summary(tmp_path / "run")["stopped_by"] == "finished"
