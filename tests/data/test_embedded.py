"""The data set that is part of the package, and the tool that made it."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from paceline.data.settings import DataSettings
from paceline.data.sources.source import EMBEDDED, open_source
from paceline.data.sources.tar_shards import TarShards

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_embedded_data.py"
ORIGINALS = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_embedded_data", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("split", "per_class"), [("train", 1200), ("val", 200)])
def test_counts_and_balance(split: str, per_class: int) -> None:
    source = open_source(DataSettings(source="embedded"), split)
    assert len(source) == 10 * per_class
    assert np.bincount(source.labels).tolist() == [per_class] * 10
    assert list(source.classes)[::9] == ["T-shirt/top", "Ankle boot"]
    assert source.name(17) == f"{split}-0000.tar.gz:000017.png"
    # Mixed, not sorted: the first samples already hold every class.
    assert set(source.labels[:100].tolist()) == set(range(10))


def test_images_are_28_by_28_png() -> None:
    source = open_source(DataSettings(source="embedded"), "val")
    for i in range(0, len(source), 97):
        data = source.read(i)
        assert isinstance(data, bytes)
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.size, image.mode) == ("PNG", (28, 28), "L")
        assert np.asarray(image).std() > 5


def test_small_enough_and_licensed() -> None:
    names = sorted(path.name for path in EMBEDDED.iterdir())
    assert names == [
        "LICENSE-fashion-mnist",
        "classes.json",
        *(f"train-{i:04d}.tar.gz" for i in range(4)),
        "val-0000.tar.gz",
    ]
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8_000_000
    licence = (EMBEDDED / "LICENSE-fashion-mnist").read_text(encoding="utf-8")
    assert "Copyright (c) 2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence
    classes = json.loads((EMBEDDED / "classes.json").read_text(encoding="utf-8"))
    assert [entry["cls"] for entry in classes] == list(range(10))


def test_no_image_is_in_both_splits() -> None:
    train, val = (open_source(DataSettings(source="embedded"), split) for split in ("train", "val"))
    known = {train.read(i) for i in range(len(train))}
    assert sum(val.read(i) in known for i in range(len(val))) == 0


def test_the_tool_writes_the_same_bytes_again(tool: ModuleType, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (6, 28, 28), dtype=np.uint8)
    labels = np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    paths = [tmp_path / "train-0000.tar.gz", tmp_path / "other.tar.gz"]
    for path in paths:
        tool.make_shard(path, images, labels, first_key=40)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    source = TarShards(paths[:1])
    assert source.labels.tolist() == labels.tolist()
    assert source.name(0) == "train-0000.tar.gz:000040.png"
    with Image.open(io.BytesIO(source.read(5))) as image:
        np.testing.assert_array_equal(np.asarray(image), images[5])


def test_the_tool_takes_the_first_of_each_class_in_file_order(tool: ModuleType) -> None:
    labels = np.array([*range(10), 0, 0, 5, *range(10)], dtype=np.uint8)
    assert tool.first_of_each_class(labels, 2).tolist() == [
        *range(11),
        12,
        *range(14, 18),
        *range(19, 23),
    ]


@pytest.mark.skipif(
    not ORIGINALS.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_pixels_are_the_originals(tool: ModuleType) -> None:
    images = tool.read_idx(ORIGINALS / "t10k-images-idx3-ubyte.gz")
    labels = tool.read_idx(ORIGINALS / "t10k-labels-idx1-ubyte.gz")
    chosen = tool.first_of_each_class(labels, 200)
    source = open_source(DataSettings(source="embedded"), "val")
    assert source.labels.tolist() == labels[chosen].tolist()
    for i in range(0, 2000, 41):
        with Image.open(io.BytesIO(source.read(i))) as image:
            np.testing.assert_array_equal(np.asarray(image), images[chosen[i]])
