from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources.cifar10 import Cifar10, find_layout
from paceline.data.sources.source import ArraySource, open_source

FORMS = ["bin", "png", "py"]


@pytest.mark.parametrize("form", FORMS)
def test_both_splits_in_canonical_order(tmp_path: Path, small_cifar: Any, form: str) -> None:
    small_cifar.write(tmp_path, form)
    settings = DataSettings(dir=str(tmp_path))
    train, val = open_source(settings, "train"), open_source(settings, "val")
    assert isinstance(train, Cifar10)
    assert isinstance(train, ArraySource)
    assert (len(train), len(val)) == (20, 4)
    assert np.array_equal(train.pixels, small_cifar.pixels[:5].reshape(-1, 32, 32, 3))
    assert train.labels.tolist() == small_cifar.labels[:5].reshape(-1).tolist()
    assert val.labels.tolist() == small_cifar.labels[5].tolist()
    assert np.array_equal(val.read(3), small_cifar.pixels[5, 3])
    assert len(train.classes) == 10
    assert (train.classes[0], train.classes[9]) == ("airplane", "truck")
    assert Path(train.name(9)).name.startswith("data_batch_3")
    assert train.name(9).endswith(":1")
    train.close()


@pytest.mark.parametrize(
    ("form", "folder"), [("bin", "cifar-10-batches-bin"), ("py", "cifar-10-batches-py")]
)
def test_the_folder_of_the_archive_may_be_between(
    tmp_path: Path, small_cifar: Any, form: str, folder: str
) -> None:
    small_cifar.write(tmp_path / folder, form)
    source = open_source(DataSettings(dir=str(tmp_path), source="cifar10"), "train")
    assert np.array_equal(source.read(19), small_cifar.pixels[4, 3])


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_file_is_named(tmp_path: Path, small_cifar: Any, form: str) -> None:
    small_cifar.write(tmp_path, form)
    next(tmp_path.glob("data_batch_4*")).unlink()
    with pytest.raises(DataError, match=r"data_batch_4\S*: is missing"):
        Cifar10(tmp_path, "train")
    assert len(Cifar10(tmp_path, "val")) == 4


def test_missing_labels_are_named(tmp_path: Path, small_cifar: Any) -> None:
    (small_cifar.write(tmp_path, "png") / "train_lables.json").unlink()
    with pytest.raises(DataError, match=r"train_lables.json: is missing"):
        Cifar10(tmp_path, "train")


def test_a_label_too_few(tmp_path: Path, small_cifar: Any) -> None:
    (small_cifar.write(tmp_path, "png") / "test_lables.json").write_text(json.dumps([1, 2, 3]))
    with pytest.raises(DataError, match=r"test_lables.json: 3 labels for 4 images"):
        Cifar10(tmp_path, "val")


def test_a_file_cut_off_between_images(tmp_path: Path, small_cifar: Any) -> None:
    path = small_cifar.write(tmp_path, "bin") / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[: 3 * 3073])
    with pytest.raises(DataError, match=r"data_batch_5.bin: 3 images, data_batch_1.bin has 4"):
        Cifar10(tmp_path, "train")


def test_no_cifar(tmp_path: Path) -> None:
    assert find_layout(tmp_path, "train") is None
    with pytest.raises(
        DataError, match="no train split of CIFAR-10 in it; CIFAR-10 is data_batch_1"
    ):
        Cifar10(tmp_path, "train")


def test_beside_another_set_the_user_decides(tmp_path: Path, small_cifar: Any) -> None:
    small_cifar.write(tmp_path, "bin")
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="holds train/ and CIFAR-10; set data.source = 'folder' or"):
        open_source(DataSettings(dir=str(tmp_path)), "train")
    assert len(open_source(DataSettings(dir=str(tmp_path), source="cifar10"), "train")) == 20


def test_the_real_set() -> None:
    directory = os.environ.get("PACELINE_CIFAR10")
    if not directory:
        pytest.skip("PACELINE_CIFAR10 does not say where CIFAR-10 lies")
    train, val = (Cifar10(Path(directory), split) for split in ("train", "val"))
    assert (len(train), len(val)) == (50_000, 10_000)
    assert np.bincount(train.labels).tolist() == [5000] * 10
    for source, digest in (
        (train, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        (val, "803d5f7f4d78ea53de84dbe85f74fb6d"),
    ):
        planes = source.pixels[:10_000].transpose(0, 3, 1, 2).reshape(10_000, -1)
        labels = source.labels[:10_000, None].astype(np.uint8)
        content = np.concatenate([labels, planes], axis=1).tobytes()
        assert hashlib.md5(content).hexdigest() == digest
