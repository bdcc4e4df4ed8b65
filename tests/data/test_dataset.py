"""A torch Dataset, or a class of the user's own, as a source, and what becomes of its mistakes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from data.small import encode, train_loader
from data_sets import png
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    BatchPlan,
    CorruptImage,
    DatasetSource,
    DataSettings,
    Source,
    as_source,
    open_data,
    register_source,
)
from refusals import refused
from small_runs import run_small


class Pictures(Dataset[Any]):
    """`make(i)` is the image of item i; labels are i % 3."""

    def __init__(self, make: Callable[[int], Any], count: int = 9, **attributes: Any) -> None:
        self._make = make
        self._count = count
        self.calls = 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        self.calls += 1
        return self._make(i), i % 3


def pixels(i: int, channels: int = 3) -> np.ndarray:
    shape = (5 + i, 7, channels) if channels else (5 + i, 7)
    return np.full(shape, 10 * i % 256, dtype=np.uint8)


def chw(i: int) -> torch.Tensor:
    return torch.from_numpy(pixels(i)).permute(2, 0, 1)


def encoded(i: int) -> bytes:
    return encode(pixels(i))


@pytest.mark.parametrize(
    ("make", "channels"),
    [
        (pixels, 3),
        (lambda i: pixels(i, 1), 1),
        (lambda i: pixels(i, 0), 1),
        (lambda i: pixels(i, 4), 3),
        (lambda i: Image.fromarray(pixels(i)), 3),
        (lambda i: Image.fromarray(pixels(i, 0)), 1),
        (lambda i: Image.fromarray(pixels(i)).quantize(4), 3),
        (chw, 3),
        (lambda i: chw(i)[:1], 1),
        (lambda i: chw(i).float() / 255, 3),
    ],
)
def test_images_of_all_kinds_become_the_same_pixels(make: Any, channels: int) -> None:
    source = DatasetSource(Pictures(make))
    assert source.labels.tolist() == [0, 1, 2] * 3
    assert list(source.classes) == ["0", "1", "2"]
    for i in (0, 8):
        found = source.read(i)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.uint8
        assert np.array_equal(found, pixels(i, channels))
    assert source.name(4) == "Pictures[4]"


def test_labels_are_taken_from_the_dataset_or_read_once() -> None:
    labels = [0, 1, 2] * 3
    names = ["ant", "bee", "cat"]
    listed = Pictures(pixels, targets=torch.tensor(labels), classes=names)
    assert list(DatasetSource(listed).classes) == names
    assert listed.calls < 64, "the check of a few items, and no more"
    samples = Pictures(pixels, samples=[(f"{i}.png", i % 3) for i in range(9)])
    assert DatasetSource(samples).labels.tolist() == labels
    plain = Pictures(pixels, count=100)
    source = DatasetSource(plain)
    assert plain.calls >= 100
    assert "labels of 100 items were read once" in source.note
    # A target_transform, which `targets` knows nothing of.
    changed = DatasetSource(Pictures(pixels, targets=[5] * 9))
    assert changed.labels.tolist() == labels
    assert "differ from the dataset's own list" in changed.note
    assert DatasetSource(Pictures(pixels), labels=np.array(labels)).note == ""
    with pytest.raises(DataError, match=r"Pictures\[0\] has label 0, but `labels` gives 2"):
        DatasetSource(Pictures(pixels), labels=[2] * 9)


def test_parts_and_chains_of_datasets() -> None:
    whole = Pictures(pixels, targets=[0, 1, 2] * 3, classes=["a", "b", "c"])
    part = DatasetSource(Subset(whole, [8, 1, 3]))
    assert (part.labels.tolist(), list(part.classes)) == ([2, 1, 0], ["a", "b", "c"])
    assert np.array_equal(part.read(0), pixels(8))
    chain = DatasetSource(ConcatDataset([whole, Subset(whole, [4])]))
    assert chain.labels.tolist() == [0, 1, 2] * 3 + [1]


def test_hugging_face_items() -> None:
    class Label:
        names = ("cat", "dog")

    class HuggingFace:
        features: ClassVar[dict[str, object]] = {"image": object(), "label": Label()}

        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: int | str) -> Any:
            if isinstance(key, str):
                return [i % 2 for i in range(4)]
            return {"image": Image.fromarray(pixels(key)), "label": key % 2}

    source = DatasetSource(HuggingFace())
    assert (source.labels.tolist(), list(source.classes)) == ([0, 1, 0, 1], ["cat", "dog"])
    raw = Pictures(lambda i: {"bytes": encoded(i), "path": None})
    assert DatasetSource(raw).read(3) == encoded(3)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda i: None, r"Pictures\[0\] has an image that is None; an image is"),
        (lambda i: pixels(i).astype(np.float32), r"a array of shape \(5, 7, 3\) and float32"),
        (lambda i: torch.zeros(5, 7, 9, dtype=torch.uint8), r"a tensor of shape \(5, 7, 9\)"),
        (lambda i: np.zeros((0, 4, 3), np.uint8), r"shape \(0, 4, 3\)"),
        (lambda i: chw(i).float() - 1, "has values from -1 to -1; .*data.mean"),
        (lambda i: chw(i).float() * float("nan"), "has values from nan"),
    ],
)
def test_other_images_are_refused(make: Any, line: str) -> None:
    with pytest.raises(DataError, match=line) as caught:
        DatasetSource(Pictures(make))
    assert "\n" not in str(caught.value)


class Items(Pictures):
    def __getitem__(self, i: int) -> Any:
        return self._make(i)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda i: pixels(i), r"Items\[0\] is a array of shape .*; an item is \(image, label\)"),
        (lambda i: (pixels(i), 1.5), r"has label 1.5; a label is a class index"),
        (lambda i: (pixels(i), "cat"), r"has label 'cat'"),
        (lambda i: (pixels(i), True), r"has label True"),
        (lambda i: (pixels(i), torch.zeros(3)), r"has label a tensor"),
        (lambda i: (pixels(i), -1), r"Items\[0\] has label -1, but"),
        (lambda i: {"picture": 1, "label": 0}, r"has the keys 'picture', 'label'"),
        (lambda i: {}[i], r"Items\[0\] raised KeyError: 0; fix the dataset"),
    ],
)
def test_other_items_are_refused(make: Any, line: str) -> None:
    with pytest.raises(DataError, match=line):
        DatasetSource(Items(make))


def test_what_is_no_map_style_dataset() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(DataError, match=r"Stream: has no length"):
        DatasetSource(Stream())
    with pytest.raises(DataError, match=r"float: is not a map-style dataset"):
        as_source(1.5)
    with pytest.raises(DataError, match=r"DataLoader: is not a map-style dataset"):
        as_source(DataLoader(Pictures(pixels)))
    with pytest.raises(DataError, match=r"Pictures: is empty"):
        as_source(Pictures(pixels, count=0))
    with pytest.raises(DataError, match=r"has label 2, but there are 2 classes"):
        DatasetSource(Pictures(pixels), classes=["a", "b"])


def test_items_that_change_between_reads() -> None:
    chance = np.random.default_rng(0)
    noisy = DatasetSource(Pictures(lambda i: chance.integers(0, 256, (4, 4, 3), dtype=np.uint8)))
    assert "differs between two reads" in noisy.note
    for values in (
        {"resident": "on", "augment": "pad_crop"},
        {"cache": "memory"},
    ):  # would keep the first for good
        with pytest.raises(ConfigError, match="Pictures gives different images at every read"):
            batches(noisy, **values)
    turn = iter(range(1000))
    with pytest.raises(DataError, match=r"has label \d+, before it was \d+"):
        DatasetSource(Items(lambda i: (pixels(i), next(turn))))


class OneHandle(Pictures):
    """All threads share the position in one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(pixels, 64, targets=[i % 3 for i in range(64)])
        np.arange(64, dtype=np.uint8).repeat(768).tofile(path)
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 768)
        halves = [self.file.read(384) for _ in range(2)]
        return np.frombuffer(b"".join(halves), np.uint8).reshape(16, 16, 3), i % 3


class OneBuffer(Pictures):
    """All items have the same memory."""

    buffer = np.zeros((16, 16, 3), np.uint8)

    def __getitem__(self, i: int) -> Any:
        self.buffer[...] = i
        return self.buffer, i % 3


def test_a_dataset_that_threads_must_not_share_is_read_one_item_at_a_time(tmp_path: Path) -> None:
    handle = OneHandle(tmp_path / "raw")
    with handle.file:
        for dataset in (handle, OneBuffer(pixels, 64)):
            source = DatasetSource(dataset)
            assert "if several threads read it, so they are read one at a time" in source.note
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(source.read, range(64)))
            assert all((image == i).all() for i, image in enumerate(found))
    assert "threads" not in DatasetSource(Pictures(pixels)).note


def batches(source: Source, **values: Any) -> list[Any]:
    chosen = DataSettings(image_size=8, max_corrupt_share=0.2, **values)
    source, _ = open_data(chosen, source, source)
    plan = BatchPlan(len(source), 1, 4, 4, 1)
    with train_loader(source, plan, chosen, seed=0) as loader:
        return list(loader)


def test_an_image_that_does_not_decode_is_a_corrupt_sample(tmp_path: Path) -> None:
    content = encoded(5)
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])

    def eager(i: int) -> Any:
        return Image.open(tmp_path / "cut.png").convert("RGB") if i == 5 else pixels(i)

    def lazy(i: int) -> Any:
        return Image.open(tmp_path / "cut.png") if i == 5 else pixels(i)

    for make in (eager, lazy):
        source = DatasetSource(Pictures(make))
        with pytest.raises(CorruptImage):
            source.read(5)
        found = batches(source)
        assert [sample.name for batch in found for sample in batch.corrupt] == ["Pictures[5]"]
        assert sum(len(batch) for batch in found) == 9


def test_any_other_error_ends_the_run(tmp_path: Path) -> None:
    broken: list[int] = []

    def make(i: int) -> Any:
        return Image.open(tmp_path / "absent.png") if i in broken else pixels(i)

    source = DatasetSource(Pictures(make), serial=True)
    broken.append(5)
    with pytest.raises(DataError, match=r"Pictures\[5\] raised FileNotFoundError"):
        batches(source)


class Small(Source):
    def __init__(self, read: Any = lambda i: png(i), labels: Any = (0, 1) * 4) -> None:
        self.classes = ("a", "b")
        self.labels = labels
        self.make = read

    def read(self, i: int) -> Any:
        return self.make(i)


def test_six_lines_suffice() -> None:
    train, val = open_data(DataSettings(val_split=0.25), Small())
    assert (len(train), len(val), list(train.classes)) == (6, 2, ["a", "b"])
    assert train.labels.dtype == np.int64
    assert sorted(s.name(i) for s in (train, val) for i in range(len(s))) == [
        f"Small[{i}]" for i in range(8)
    ]
    assert train.read(0) == png(int(train.name(0)[6]))
    assert train.kind == "Small"


def test_a_registered_source_is_opened_by_name(tmp_path: Path) -> None:
    """One file outside of the package; the name is checked as those of the package are."""
    opened = []

    def open_letters(settings: DataSettings, split: str, classes: Any) -> Source:
        opened.append((split, classes and list(classes)))
        return Small()

    register_source("letters", open_letters)
    run_small(tmp_path / "run", data__source="letters", model__num_classes=2)
    assert opened == [("train", None), ("val", ["a", "b"])]
    with refused("data.source"):
        DataSettings(source="numbers")
    register_source("letters", lambda *_: Small(labels=[0.5]))
    with pytest.raises(DataError):
        open_data(DataSettings(source="letters"))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (Small(labels=[0, 2]), "Small: label 2 of image 1 is outside the 2 classes"),
        (Small(labels=[0.5]), r"Small: labels are \[0.5\]"),
        (Small(labels=[]), r"Small: labels are \[\]"),
        (Small(lambda i: {}[i]), r"Small: read\(0\) raised KeyError"),
        (Small(lambda i: "text"), r"Small: read\(0\) returned a str; return the bytes"),
        (Small(lambda i: np.zeros((4, 4), np.uint8)), r"ndarray of shape \(4, 4\), uint8"),
    ],
)
def test_mistakes_are_one_line(source: Source, line: str) -> None:
    with pytest.raises(DataError, match=line):
        as_source(source).read(0)
