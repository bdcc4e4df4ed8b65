"""What is a file's fault and what is the GPU's, with a stand-in for torchvision, on a CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device.batch_decoder import sound_jpeg
from paceline.data.on_device.nvjpeg import NvJpegDecoder, raise_unless_a_file

CPU = torch.device("cpu")
SOUND, ODD, HUGE = sound_jpeg(), b"odd", b"huge"
WRAPPED = "Error while decoding JPEG images: "


class StandIn:
    """Fails as torchvision does, with whatever `says` has for a file of the list."""

    ImageReadMode = SimpleNamespace(RGB=3)

    def __init__(self) -> None:
        self.says: dict[bytes, str] = {}
        self.calls: list[int] = []

    def decode_jpeg(self, files: list[torch.Tensor], **_: Any) -> list[torch.Tensor]:
        self.calls.append(len(files))
        for file in files:
            words = self.says.get(bytes(file.numpy()))
            if words is not None:
                raise RuntimeError(f"{WRAPPED}{words}\nException raised from malloc_allocator: 4")
        return [torch.zeros(3, 2, 2) for _ in files]


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, package = StandIn(), ModuleType("torchvision")
    package.__version__ = "0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.io", stand_in)  # type: ignore[arg-type]
    return stand_in


def test_one_bad_file_is_refused_and_the_others_are_decoded(vision: StandIn) -> None:
    decoder = NvJpegDecoder(CPU)
    vision.says[ODD] = "Failed to parse jpeg stream: 4"
    found = decoder([SOUND, ODD, SOUND])
    assert [image is not None for image in found.images] == [True, False, True]
    assert found.problem == WRAPPED + "Failed to parse jpeg stream: 4"
    # The probe, the chunk, each file, and the sound one, which shows that the decoder is well.
    assert vision.calls == [1, 3, 1, 1, 1, 1]
    assert decoder([SOUND]).problem == ""


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "Failed to decode batch: 5",
        "Failed to allocate the output",
    ],
)
def test_memory_is_no_files_fault(vision: StandIn, words: str) -> None:
    decoder = NvJpegDecoder(CPU)
    vision.says[HUGE] = words
    with pytest.raises(torch.OutOfMemoryError, match=words.split(".")[0]):
        decoder([SOUND, HUGE])
    assert vision.calls == [1, 2]  # nothing was tried again


def test_memory_that_runs_out_with_a_file_alone(vision: StandIn) -> None:
    decoder = NvJpegDecoder(CPU)
    vision.says = {ODD: "Failed to get image info: 3", HUGE: "Failed to decode batch: 5"}
    with pytest.raises(torch.OutOfMemoryError):
        decoder([ODD, HUGE])


def test_a_decoder_that_is_broken_ends_the_run(vision: StandIn) -> None:
    decoder = NvJpegDecoder(CPU)
    vision.says = {ODD: "Failed to decode batch: 6", SOUND: "Failed to decode batch: 6"}
    with pytest.raises(RunError, match="no longer decodes even a sound file"):
        decoder([ODD])


@pytest.mark.parametrize(
    ("words", "is_a_files"),
    [
        ("Failed to get image info: 3", True),
        ("Failed to decode jpeg stream: 10", True),
        ("Unknown chroma subsampling", True),
        ("Failed to create nvjpeg state: 1", False),
        # 4 is not nvJPEG's "not supported" here, but a number of CUDA's.
        ("Failed to synchronize CUDA stream: 4", False),
        ("something new", False),
    ],
)
def test_whose_fault(words: str, is_a_files: bool) -> None:
    error = RuntimeError(WRAPPED + words)
    if is_a_files:
        raise_unless_a_file(error)
    else:
        with pytest.raises(RuntimeError, match=words):
            raise_unless_a_file(error)


def test_a_torchvision_without_nvjpeg(vision: StandIn) -> None:
    vision.says[SOUND] = "not compiled with nvJPEG support"
    with pytest.raises(ConfigError, match="cannot decode on the GPU .*not compiled with nvJPEG"):
        NvJpegDecoder(CPU)
