from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError, DataError
from paceline.data import create_loader as module
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_eval_loader, create_train_loader
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.loader_protocol import EvalBatches, TrainBatches
from paceline.data.on_device.pixel_form import UnequalSizesError
from paceline.data.on_device.resident_loader import ResidentEvalLoader, ResidentTrainLoader
from paceline.data.settings import DataSettings

Make = Callable[..., DataSettings]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def train(source: Any, chosen: DataSettings, device: torch.device = CPU) -> TrainBatches:
    plan = BatchPlan(len(source), 1, 4, 4, 1)
    return create_train_loader(
        source, plan, chosen, seed=0, rank=0, first_step=0, device=device
    )  # fmt: skip


def evaluation(source: Any, chosen: DataSettings, device: torch.device = CPU) -> EvalBatches:
    return create_eval_loader(
        source, chosen, rank=0, world_size=1, batch_size=4, device=device
    )  # fmt: skip


@pytest.mark.parametrize("wanted", ["off", "auto"])
def test_threads_without_a_gpu(memory_source: Any, small_settings: Make, wanted: str) -> None:
    source, chosen = memory_source(8), small_settings(resident=wanted, workers=2)
    with train(source, chosen) as loader, evaluation(source, chosen) as passes:
        assert isinstance(loader, TrainLoader)
        assert isinstance(passes, EvalLoader)
        assert loader.describe() == passes.describe() == "2 threads"
        assert next(loader).images.shape == (4, 8, 8, 1)
    assert source.reads  # by threads, when asked for
    assert train(source, small_settings(resident=wanted, workers=1)).describe() == "1 thread"
    assert train(source, small_settings(resident=wanted, workers=0)).describe() == "no threads"


def test_resident_where_asked_for_and_decoded_once(
    memory_source: Any, small_settings: Make
) -> None:
    source, chosen = memory_source(8), small_settings(resident="on", resident_max_mib=0)
    for _ in range(3):
        with train(source, chosen) as loader, evaluation(source, chosen) as passes:
            assert isinstance(loader, ResidentTrainLoader)
            assert isinstance(passes, ResidentEvalLoader)
            assert loader.describe() == "resident on cpu, 0 MiB"
            assert len(list(loader)) == len(list(passes)) == 2
    assert sorted(source.reads) == list(range(8))


@pytest.mark.parametrize("make", [train, evaluation])
def test_a_large_set_stays_with_the_threads(
    memory_source: Any, small_settings: Make, make: Callable[..., Any]
) -> None:
    chosen = small_settings(image_size=200, resident_max_mib=1, workers=2)
    said = make(memory_source(100), chosen, GPU).describe()
    assert said == "2 threads (not resident: 4 MiB, over data.resident_max_mib)"


@pytest.mark.parametrize("make", [train, evaluation])
def test_a_decoder_on_the_gpu_is_never_passed_over(
    memory_source: Any, small_settings: Make, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """Whoever names one gets it, and hears that the set is not resident for it."""
    told: list[str] = []

    def decoded_there(*_: object, remark: str, **more: object) -> Any:
        told.append(remark)
        return memory_source(1)

    monkeypatch.setattr(module, "DeviceTrainLoader", decoded_there)
    monkeypatch.setattr(module, "DeviceEvalLoader", decoded_there)
    source = memory_source(8)
    source.remark = "index built anew"
    make(source, small_settings(decoder="nvjpeg"), GPU)
    make(source, small_settings(decoder="dali", resident="off"), GPU)
    assert told == ["not resident: data.decoder = nvjpeg; index built anew", "index built anew"]
    assert source.reads == []
    with pytest.raises(ConfigError, match="data.resident = 'on': .*set data.resident = 'off', or"):
        make(source, small_settings(decoder="nvjpeg", resident="on"), GPU)


def images_of(sizes: list[int]) -> Any:
    class Mixed:
        classes = ("a",)
        labels = np.zeros(len(sizes), dtype=np.int64)

        def __len__(self) -> int:
            return len(sizes)

        def read(self, i: int) -> np.ndarray:
            return np.full((sizes[i], 9, 1), 50, dtype=np.uint8)

        def name(self, i: int) -> str:
            return str(i)

        def close(self) -> None: ...

    return Mixed()


def test_boxes_need_images_of_one_size(small_settings: Make) -> None:
    chosen = small_settings(resident="on", augment="random_resized_crop")
    assert isinstance(train(images_of([9] * 5), chosen), ResidentTrainLoader)
    with pytest.raises(ConfigError, match="there are images of 9 × 9 and of 9 × 7; set") as caught:
        train(images_of([9, 9, 7]), chosen)
    assert caught.value.field == "data.resident"
    fitted = small_settings(resident="on", augment="pad_crop")
    assert isinstance(train(images_of([9, 9, 7]), fitted), ResidentTrainLoader)


def test_auto_says_why_not(
    memory_source: Any, small_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UnequalSizesError("images of 1 × 2 and of 3 × 4")

    monkeypatch.setattr(module, "resident_set", refuse)
    chosen = small_settings(augment="random_resized_crop", workers=2)
    said = train(memory_source(8), chosen, GPU).describe()
    assert said == "2 threads (not resident: images of 1 × 2 and of 3 × 4)"


@pytest.mark.parametrize("wanted", ["on", "auto"])
def test_no_room_on_the_device(
    memory_source: Any, small_settings: Make, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "resident_set", refuse)
    with pytest.raises(ConfigError, match="no room for 0 MiB on cuda:0; set data.resident = 'off'"):
        train(memory_source(8), small_settings(resident=wanted), GPU)


def test_a_set_without_a_good_sample_fails_as_ever(
    memory_source: Any, small_settings: Make
) -> None:
    chosen = small_settings(resident="on", augment="random_resized_crop")
    with (
        train(memory_source(6, corrupt=set(range(6))), chosen) as loader,
        pytest.raises(DataError, match="corrupt of 6 samples"),
    ):
        next(loader)


def test_failing_storage_shows_at_once(memory_source: Any, small_settings: Make) -> None:
    source = memory_source(6)
    source.failure = DataError("gone")
    with pytest.raises(DataError, match="gone"):
        train(source, small_settings(resident="on"))
