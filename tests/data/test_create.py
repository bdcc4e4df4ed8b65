"""Which decoder a loader gets, and what it says of the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from data.small import MemorySource, eval_loader, small_settings, train_loader
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    BatchPlan,
    DataSettings,
    EvalLoader,
    EvalTransform,
    RegionUnavailableError,
    Source,
    TrainLoader,
    region_library,
)
from paceline.data.decode import region
from paceline.data.decode.region import RegionDecoder
from paceline.data.device import gpu_decoder as gpu_decoder_module
from paceline.data.device import resident
from paceline.data.loaders import create as creating
from paceline.data.loaders.create import create_host_decoder
from refusals import refused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def train(source: Any, chosen: DataSettings, device: torch.device = CPU) -> TrainLoader:
    plan = BatchPlan(len(source), 1, 4, 4, 1)
    return train_loader(source, plan, chosen, seed=0, device=device)


def evaluation(source: Any, chosen: DataSettings, device: torch.device = CPU) -> EvalLoader:
    return eval_loader(source, chosen, batch_size=4, device=device)


@pytest.mark.parametrize("wanted", ["off", "auto"])
def test_threads_without_a_gpu(wanted: str) -> None:
    source, chosen = MemorySource(8), small_settings(resident=wanted, workers=2)
    with train(source, chosen) as loader, evaluation(source, chosen) as passes:
        assert loader.describe() == passes.describe() == "2 threads"
        assert next(loader).images.shape == (4, 8, 8, 1)
    assert source.reads  # by threads, when asked for
    assert train(source, small_settings(resident=wanted, workers=1)).describe() == "1 thread"
    assert train(source, small_settings(resident=wanted, workers=0)).describe() == "no threads"


@pytest.mark.parametrize("make", [train, evaluation])
def test_a_large_set_stays_with_the_threads(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.device.resident.RESIDENT_MAX_MIB", 1)
    chosen = small_settings(image_size=200, workers=2)
    assert "not resident" in make(MemorySource(100), chosen, GPU).describe()


@pytest.mark.parametrize("make", [train, evaluation])
def test_a_decoder_on_the_gpu_is_never_passed_over(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """A decoder on the GPU is used if the settings name it, and a note gives the reason."""

    class Noted(MemorySource):  # type: ignore[misc]
        note = "index built anew"

    notes: list[object] = []

    def gpu_decoder(host: Any, *more: Any) -> Any:
        notes.append(more[-1])
        return host

    monkeypatch.setattr(gpu_decoder_module, "GpuDecoder", gpu_decoder)
    monkeypatch.setattr(gpu_decoder_module, "NvJpeg", lambda device: MemorySource(1))
    monkeypatch.setattr(MemorySource, "describe", lambda self: "nvJPEG", raising=False)
    chosen = small_settings(decoder="nvjpeg", channels=3, augment="random_resized_crop")
    source = Noted(8)
    monkeypatch.setattr(creating, "CopyingDecoder", lambda decoder, device: decoder)
    make(source, chosen, GPU)
    note = "not resident: data.decoder = 'nvjpeg' decodes every batch"
    assert notes == [(note, "index built anew")]
    with pytest.raises(ConfigError, match="data.resident = 'on': .*set data.resident = 'off', or"):
        make(source, replace(chosen, resident="on"), GPU)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': decodes on a GPU, but the dev"):
        make(source, chosen, CPU)


class Mixed(Source):
    """Images of these heights."""

    def __init__(self, *heights: int) -> None:
        self.classes = ("a",)
        self.labels = np.zeros(len(heights), dtype=np.int64)
        self._heights = heights

    def read(self, i: int) -> np.ndarray:
        return np.full((self._heights[i], 9, 1), 50, dtype=np.uint8)


def test_random_boxes_are_resampled_on_the_host() -> None:
    chosen = small_settings(resident="on", augment="random_resized_crop")
    assert "resident on cpu" in evaluation(Mixed(9, 9, 7), chosen).describe()
    with refused("data.resident"):
        train(Mixed(9, 9, 7), chosen)
    fitted = small_settings(resident="on", augment="pad_crop")
    assert "resident on cpu" in train(Mixed(9, 9, 7), fitted).describe()


def test_auto_says_why_not_and_a_device_without_memory_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(resident, "resident_set", refuse)
    chosen = small_settings(augment="random_resized_crop", workers=2)
    assert "not resident: data.augment" in train(MemorySource(8), chosen, GPU).describe()
    for wanted in ("on", "auto"):
        with refused("data.resident"):
            train(MemorySource(8), small_settings(resident=wanted), GPU)


def test_a_set_without_a_good_sample_or_on_failing_storage() -> None:
    chosen = small_settings(resident="on")
    with (
        train(MemorySource(6, corrupt=set(range(6))), chosen) as loader,
        pytest.raises(DataError, match="corrupt of 6 samples"),
    ):
        next(loader)
    source = MemorySource(6)
    source.failure = DataError("gone")
    with pytest.raises(DataError, match="gone"):
        train(source, small_settings(resident="on"))


# --- the host's decoders -----------------------------------------------------------------------


@pytest.fixture
def jpeg_source() -> Any:
    source = MemorySource(200)
    source.name = lambda i: f"train-0.tar:{i}.JPEG" if i % 2 else f"train-0.tar:{i}.png"
    return source


@pytest.fixture
def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RegionUnavailableError("no C compiler", "install gcc")

    monkeypatch.setattr(region, "region_library", refuse)


def described(source: Any, chosen: DataSettings, *notes: str) -> str:
    return create_host_decoder(source, EvalTransform(chosen), chosen, notes).describe()


@pytest.mark.parametrize("decoder", ["auto", "region"])
def test_the_region_decoder_where_it_is(jpeg_source: Any, decoder: str) -> None:
    try:
        region_library()
    except RegionUnavailableError as error:
        pytest.skip(f"no region decoder here: {error}")
    chosen = small_settings(decoder=decoder)
    made = create_host_decoder(jpeg_source, EvalTransform(chosen), chosen, ["a note"])
    assert isinstance(made, RegionDecoder)
    assert made.describe().startswith("no threads (region decoder, built against libjpeg-turbo ")
    assert made.describe().endswith("; a note)")


@pytest.mark.usefixtures("_missing")
def test_without_the_library(jpeg_source: Any) -> None:
    told = described(jpeg_source, small_settings(decoder="auto"), "a note")
    assert told == "no threads (Pillow decodes; no region decoder: no C compiler; a note)"
    with pytest.raises(ConfigError, match="no C compiler; install gcc, or set it to 'auto'"):
        described(jpeg_source, small_settings(decoder="region"))


def test_pillow_on_demand_and_where_nothing_is_a_jpeg(
    jpeg_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "region_library", lambda: pytest.fail("asked"))
    pillow = small_settings(decoder="pillow", workers=2)
    assert described(jpeg_source, pillow, "not resident") == (
        "2 threads (Pillow decodes; not resident)"
    )
    source = MemorySource(50)
    assert described(source, small_settings()) == "no threads"
    assert source.reads == []
    assert described(MemorySource(0), small_settings()) == "no threads"
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': decodes on a GPU"):
        described(
            source,
            small_settings(decoder="nvjpeg", channels=3, augment="random_resized_crop"),
        )
