"""Prediction and export: the run's own outputs, in every format, from files, images and arrays."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

import paceline as pl
from api.conftest import trainer
from paceline.cli.app import app
from refusals import refused
from tools.test_docs import blocks


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for number, (width, height) in enumerate([(40, 30), (28, 28), (31, 64)]):
        pixels = chance.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_files_images_and_arrays_agree(trained: pl.Trainer, photos: Path) -> None:
    files = sorted(photos.glob("*.png"))
    images = [Image.open(file) for file in files]
    arrays = [np.asarray(image) for image in images]
    found = [trained.predict(given, top=4) for given in (files, images, arrays)]
    for prediction, other in zip(found[0], found[1], strict=True):
        assert prediction.labels == other.labels
        assert prediction.confidences == pytest.approx(other.confidences, abs=1e-5)
        assert sum(prediction.confidences) == pytest.approx(1, abs=1e-5)
    assert [p.labels for p in found[1]] == [p.labels for p in found[2]]


def test_bad_images_are_named_and_the_others_classified(
    trained: pl.Trainer, photos: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not an image")
    found = trained.predict([bad, photos / "0.png", tmp_path / "missing.png"])
    assert [bool(p.error) for p in found] == [True, False, True]
    assert not trained.predict([bad])[0].label
    with pytest.raises(pl.DataError, match="float"):
        trained.predict([np.zeros((3, 3))])  # type: ignore[list-item]


def test_the_command_prints_and_writes_all_of_it(
    trained: pl.Trainer, photos: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    more = ["--top", "2", "--json", "--csv", str(table)]
    words = ["predict", str(trained.folder), str(photos), *more]
    done = CliRunner().invoke(app, words, standalone_mode=False, catch_exceptions=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    (predicted, *_) = trained.predict([rows[0]["name"]], top=2)
    assert rows[0] == {
        "name": predicted.name, "labels": list(predicted.labels), "error": "",
        "confidences": pytest.approx(predicted.confidences),
    }  # fmt: skip
    assert all(len(row["labels"]) == 2 for row in rows)
    lines = table.read_text().splitlines()
    assert lines[0] == "name,label1,confidence1,label2,confidence2,error"
    assert len(lines) == 4
    assert rows[0]["labels"][0] in lines[1]


def test_safetensors_has_weights_and_preprocessing(trained: pl.Trainer, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    trained.export(out)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    predictor = trained.predictor()
    assert names == set(predictor.model.state_dict())
    assert json.loads(metadata["classes"]) == list(predictor.classes)
    assert json.loads(metadata["mean"]) == [0.5]
    assert metadata["image_size"] == "12"


def test_a_program_computes_what_the_run_computes(trained: pl.Trainer, tmp_path: Path) -> None:
    out = tmp_path / "net.pt2"
    assert "equal to the run" in trained.export(out)
    extra = {"paceline.json": ""}
    program = torch.export.load(out, extra_files=extra)
    predictor = trained.predictor()
    images = predictor.example_input()
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), predictor.model(images))
    assert json.loads(extra["paceline.json"])["classes"] == list(predictor.classes)


def test_onnx_runtime_computes_what_the_run_computes(trained: pl.Trainer, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "net.onnx"
    assert "in ONNX Runtime" in trained.export(out)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 1, 12, 12]
    assert session.get_outputs()[0].shape == ["batch", 4]
    properties = session.get_modelmeta().custom_metadata_map
    predictor = trained.predictor()
    assert json.loads(properties["paceline.classes"]) == list(predictor.classes)
    images = predictor.example_input()
    (scores,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(scores), predictor.model(images), rtol=1e-3, atol=1e-4
        )


class Net(nn.Sequential):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, num_classes),
        )  # fmt: skip


def test_a_python_object_is_exported_and_the_documented_program_predicts(
    tmp_path: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/models.md has the program. The model is exported again by another trainer with its object."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    colour = {"data.channels": 3, "data.mean": [0.5, 0.4, 0.3], "data.std": [0.25, 0.3, 0.2]}
    settings = {**colour, "data.eval_resize": 15, "data.interpolation": "bicubic", "run.epochs": 1}
    made = trainer(tmp_path / "run", model=Net, settings=settings)
    made.fit()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pl.ConfigError, match="python:Net"):
        pl.Predictor.load("run", trust=True)
    trainer(tmp_path / "run", model=Net, settings=settings).export("net.onnx", opset=18)
    assert [entry.version for entry in onnx.load("net.onnx").opset_import if not entry.domain] == [
        18
    ]
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    (program,) = (block for block in blocks(page, "python") if "net.onnx" in block)
    for photo in photos.glob("*.png"):
        exif = Image.Exif()
        exif[0x0112] = 6  # lies on its side
        with Image.open(photo) as image:
            image.resize((3 * image.width, 5 * image.height)).save("photo.jpg", exif=exif)
        capsys.readouterr()
        exec(program, {})
        found = ast.literal_eval(capsys.readouterr().out)
        (wanted,) = made.predict(["photo.jpg"], top=4)
        confidences = dict(zip(wanted.labels, wanted.confidences, strict=True))
        assert found == pytest.approx(confidences, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "opset", "field"),
    [
        ("x.onnx", 17, "opset"),
        ("x.onnx", 10**6, "opset"),
        ("x.pt2", 18, "opset"),
        ("x.tflite", None, "OUT"),
    ],
)
def test_a_format_or_opset_that_cannot_be_written_is_refused(
    trained: pl.Trainer, tmp_path: Path, name: str, opset: int | None, field: str
) -> None:
    with refused(field):
        trained.export(tmp_path / name, opset=opset)
    assert not (tmp_path / name).exists()
