"""What our code does around DALI, with a stand-in for it, on a CPU."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device import dali_decode
from paceline.data.on_device.batch_decoder import DeviceImage, sound_jpeg
from paceline.data.on_device.dali_decode import DaliDecoder
from paceline.data.on_device.jpeg_facts import JpegFile, jpeg_file

CPU = torch.device("cpu")


def of(data: bytes) -> JpegFile:
    return JpegFile(data, 2, 2, b"")


class StandIn:
    """One buffer serves every run of a pipeline, as DALI's does."""

    def __init__(self) -> None:
        self.built = 0
        self.no_build = ""
        self.refused: dict[bytes, str] = {}

    def Pipeline(self, **_: Any) -> Any:
        return _Pipeline(self)


class _Pipeline:
    def __init__(self, dali: StandIn) -> None:
        self._dali = dali
        self._buffer = torch.zeros(64, 2, 2, 3)
        self._failed = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def set_outputs(self, pixels: object) -> None: ...

    def build(self) -> None:
        if self._dali.no_build:
            raise RuntimeError(self._dali.no_build)
        self._dali.built += 1

    def feed_input(self, name: str, files: list[np.ndarray]) -> None:
        self._files = [file.tobytes() for file in files]

    def run(self) -> tuple[torch.Tensor]:
        assert not self._failed, "a pipeline that failed was used again"
        for place, file in enumerate(self._files):
            if file in self._dali.refused:
                self._failed = True
                raise RuntimeError(self._dali.refused[file])
            self._buffer[place] = len(file)
        return (self._buffer,)


@pytest.fixture
def dali(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, package = StandIn(), ModuleType("nvidia.dali")
    package.__version__ = "0.0"  # type: ignore[attr-defined]
    package.Pipeline = stand_in.Pipeline  # type: ignore[attr-defined]
    decoders = SimpleNamespace(image=lambda *_, **__: None)
    functions = SimpleNamespace(external_source=lambda **_: None, decoders=decoders)
    types = SimpleNamespace(DALIImageType=SimpleNamespace(RGB=0))
    for name, module in (("", package), (".fn", functions), (".types", types)):
        monkeypatch.setitem(sys.modules, "nvidia.dali" + name, module)
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    return stand_in


def test_images_are_copies_that_are_there_before_the_next_run(
    dali: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(dali_decode, "finish_current", waits.append)
    decoder = DaliDecoder(CPU)
    first, second = decoder([of(b"1"), of(b"22")]), decoder([of(b"4444")])
    held = (*first.held, *second.held)
    assert [float(image.mean()) for image in held] == [1, 2, 4]
    images = (*first.images, *second.images)
    assert images == tuple(DeviceImage(image.data_ptr(), 2, 2) for image in held)
    assert waits == [CPU] * 3  # the probe's, too
    assert dali.built == 2  # the probe's, and this thread's


def test_a_file_that_it_refuses(dali: StandIn) -> None:
    decoder, dali.refused = DaliDecoder(CPU), {b"odd": "unsupported"}
    found = decoder([of(b"1"), of(b"odd"), of(b"22")])
    assert [image is not None for image in found.images] == [True, False, True]
    assert found.problem == "unsupported"


def test_a_pipeline_that_cannot_be_built_is_no_files_fault(dali: StandIn) -> None:
    decoder, dali.no_build = DaliDecoder(CPU), "no driver"
    with pytest.raises(RunError, match=r"DALI cannot build its decoder \(no driver\)"):
        decoder([of(b"1"), of(b"22")])
    with pytest.raises(ConfigError, match="data.decoder = 'dali': DALI cannot decode here"):
        DaliDecoder(CPU)


def test_a_decoder_that_is_broken_ends_the_run(dali: StandIn) -> None:
    decoder = DaliDecoder(CPU)
    dali.refused = {b"odd": "unsupported", bytes(sound_jpeg().data): "unsupported"}
    with pytest.raises(RunError, match="no longer decodes even a sound file"):
        decoder([of(b"1"), of(b"odd")])


def test_neither_is_memory(dali: StandIn) -> None:
    decoder, dali.refused = DaliDecoder(CPU), {b"big": "CUDA allocation failed"}
    with pytest.raises(torch.OutOfMemoryError, match="CUDA allocation failed"):
        decoder([of(b"1"), of(b"big")])


def jpeg(width: int, height: int) -> tuple[JpegFile, np.ndarray]:
    """A file, and what Pillow makes of it."""
    noise = np.random.default_rng(width).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG")
    found = jpeg_file(stream.getvalue())
    assert found is not None
    return found, np.asarray(Image.open(stream))


def test_with_dali_itself() -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    decoder = DaliDecoder(CPU)
    for count in (3, 1, 64):
        pairs = [jpeg(100 + 7 * i, 80 + 3 * i) for i in range(count)]
        found = decoder([file for file, _ in pairs])
        for (file, wanted), image, shown in zip(pairs, found.images, found.held, strict=True):
            assert image == DeviceImage(shown.data_ptr(), file.width, file.height)
            assert np.abs(shown.numpy().astype(int) - wanted).max() <= 8
    junk = jpeg(90, 70)[0]._replace(data=b"\xff\xd8\xffnonsense" * 30)
    found = decoder([jpeg(100, 80)[0], junk, jpeg(120, 90)[0]])
    assert [image is not None for image in found.images] == [True, False, True]
    assert "decoders.image" in found.problem
