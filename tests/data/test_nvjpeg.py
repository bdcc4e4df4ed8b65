"""nvJPEG on a CPU, with a fake library in C: arguments, errors, memory, and supported files."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.small import encode, in_threads, noise
from paceline.core.errors import ConfigError, RunError
from paceline.data.device import nvjpeg_library
from paceline.data.device.nvjpeg import Decoded, JpegFile, NvJpeg, jpeg_file
from paceline.data.device.nvjpeg_library import NvJpegLibrary, load_nvjpeg

CPU = torch.device("cpu")
SOURCE = Path(__file__).with_name("fake_nvjpeg.c")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
OUT_OF_MEMORY, EXECUTION_FAILED = 5, 6


class Fake:
    """The fake library and its counters."""

    def __init__(self, path: Path) -> None:
        self.library = NvJpegLibrary(str(path))
        self._loaded = ctypes.CDLL(str(path))

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._loaded, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._loaded, name).value = value


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Built for each test: the numbers in it live as long as the process."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    target = tmp_path / "libnvjpeg.so"
    assert COMPILER
    subprocess.run(
        [COMPILER, "-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-o", target, SOURCE],
        check=True,
    )
    return Fake(target)


def file(
    width: int = 100, height: int = 70, *, batched: bool = True, level: int = 9, status: int = 0
) -> JpegFile:
    data = bytes([width, height, batched, level, status])
    return JpegFile(data, width, height, b"baseline" if batched else b"progressive")


def planes(found: Decoded, place: int) -> np.ndarray:
    image = found.images[place]
    kind = ctypes.c_uint8 * (3 * image.height * image.width)
    return np.array(kind.from_address(image.address)).reshape(3, image.height, image.width)


def test_every_image_lies_where_it_says(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    files = [
        file(70, 64, level=1), file(90, 80, level=20, batched=False), file(200, 100, level=40),
        file(65, 190, level=60),
    ]  # fmt: skip
    found = decoder([*files, file(level=80)._replace(data=memoryview(file(level=80).data))])
    for place, level in enumerate((1, 20, 40, 60, 80)):
        shown = planes(found, place)
        assert [set(plane.ravel()) for plane in shown] == [{level}, {level + 1}, {level + 2}]
    assert [image[1:] for image in found.images if image][:2] == [(70, 64), (90, 80)]
    assert found.problem == ""
    assert (fake["batches"], fake["singles"]) == (2, 1)  # the probe's batch, too
    assert fake["room"] == 64 * 1280 * 1280
    assert decoder.describe() == "nvJPEG 11.12.13 (JPEG engines)"


def test_the_engines_are_asked_once_for_a_kind_of_usual_size(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    before = fake["asked"]
    decoder([file(), file(120), file(64, 64)])
    assert fake["asked"] == before + 1
    decoder([file(63, 200), file(63, 200), file()])
    assert fake["asked"] == before + 3
    # A refusal is one file's: the next of its kind may be better.
    decoder([file(batched=False), file(batched=False)])
    assert fake["asked"] == before + 5


def test_without_engines_each_goes_alone(fake: Fake) -> None:
    fake["engines"] = 0
    decoder = NvJpeg(CPU, fake.library)
    assert [planes(decoder([file(), file(level=30)]), i)[0, 0, 0] for i in (0, 1)] == [9, 30]
    assert fake["batches"] == 0
    assert "no JPEG engines" in decoder.describe()


def test_engines_that_do_not_take_a_sound_file_are_none(fake: Fake) -> None:
    fake["takes_sound"] = 0
    decoder = NvJpeg(CPU, fake.library)
    assert "no JPEG engines" in decoder.describe()
    decoder([file(), file()])
    assert fake["batches"] == 0


def test_a_sound_file_of_another_size_is_no_success(fake: Fake) -> None:
    fake["sound_side"] = 1
    with pytest.raises(ConfigError, match="does not work here .a sound file: not the size"):
        NvJpeg(CPU, fake.library)
    assert fake["alive"] == 0


def test_an_engine_that_cannot_be_asked_leaves_nothing_behind(fake: Fake) -> None:
    fake["no_headers"] = 8
    with pytest.raises(ConfigError, match="nvjpegJpegStreamParseHeader: internal error"):
        NvJpeg(CPU, fake.library)
    assert fake["alive"] == 0


def test_a_file_of_another_size_than_it_seemed_is_never_decoded(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    found = decoder([file(), file()._replace(width=99), file(level=30)])
    assert [image is not None for image in found.images] == [True, False, True]
    assert int(planes(found, 2)[0, 0, 0]) == 30
    assert found.problem == "not the size that the file says"
    assert decoder([file()._replace(height=1)]).images == [None]


def test_one_bad_file_is_refused_and_the_others_are_decoded(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    found = decoder([file(), file(status=4), file(level=50, batched=False), file(level=3)])
    assert [image is not None for image in found.images] == [True, False, True, True]
    assert [int(planes(found, i)[0, 0, 0]) for i in (0, 2, 3)] == [9, 50, 3]
    assert found.problem == "nvjpegDecodeBatched: not supported (4)"
    assert decoder([file()]).problem == ""


def test_memory_is_no_files_fault(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    with pytest.raises(torch.OutOfMemoryError, match="allocation failed"):
        decoder([file(), file(status=OUT_OF_MEMORY)])
    with pytest.raises(torch.OutOfMemoryError):
        decoder([file(status=4), file(status=OUT_OF_MEMORY)])


def test_what_is_no_files_fault_is_raised(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    for _ in range(nvjpeg_library._STATES + 1):
        with pytest.raises(RunError, match=r"nvJPEG fails \(nvjpegDecodeBatched: not initialised"):
            decoder([file(status=1)])
    assert decoder([file()]).images[0] is not None  # no call waits for destroyed states


def test_a_decoder_that_is_broken_ends_the_run(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    fake["broken"] = EXECUTION_FAILED
    with pytest.raises(RunError, match="no longer decodes even a sound file .*execution failed"):
        decoder([file(status=EXECUTION_FAILED)])


def test_one_that_never_worked_is_refused(fake: Fake) -> None:
    fake["broken"] = 8
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': nvJPEG does not work here"):
        NvJpeg(CPU, fake.library)


def test_threads_share_few_states_and_all_goes_with_the_decoder(fake: Fake) -> None:
    decoder = NvJpeg(CPU, fake.library)
    levels: list[int] = []

    def work(decoder: NvJpeg, level: int) -> None:
        for _ in range(50):
            levels.append(int(planes(decoder([file(level=level)]), 0)[2, 5, 5]) - level)

    in_threads(*(partial(work, decoder, level) for level in (1, 50, 100)))
    decoder([file(status=4), file()])
    assert set(levels) == {2}
    assert 2 < fake["alive"] <= 2 + 2 * 3  # handles, and two times what a chunk needs
    del decoder
    gc.collect()
    assert fake["alive"] == 0


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_no_library_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "libnvjpeg.so"
    monkeypatch.setattr(nvjpeg_library, "_places", lambda _: iter([str(other)]))
    with pytest.raises(ConfigError, match="nvJPEG cannot be loaded .*pip install nvidia-nvjpeg"):
        NvJpeg(CPU)
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", other, source], check=True)
    with pytest.raises(OSError, match="has no nvjpegCreateEx"):
        load_nvjpeg("13.0")


# --- which files are taken ---------------------------------------------------------------------


def jpeg(mode: str = "RGB", size: tuple[int, int] = (21, 13), **options: Any) -> bytes:
    return encode(Image.fromarray(noise(*size)).convert(mode), "JPEG", **options)


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "L"},
        {"progressive": True},
        {"subsampling": "4:4:4"},
        {"optimize": True, "comment": b"words"},
        {"exif": exif(1)},
        {"restart_marker_blocks": 2},
    ],
)
def test_what_the_device_takes(options: dict[str, Any]) -> None:
    data = jpeg(**options)
    for form in (data, memoryview(data)):
        found = jpeg_file(form)
        assert (found.width, found.height) == options.get("size", (21, 13))
        assert found.data is form
    assert jpeg_file(data + b"\0" * 8) is not None


def test_kinds_tell_codings_apart_and_no_sizes() -> None:
    def kind(**options: Any) -> bytes:
        found = jpeg_file(jpeg(**options))
        return found.kind

    assert kind() == kind(size=(300, 200)) == kind(comment=b"words")
    others = [
        kind(), kind(mode="L"), kind(progressive=True), kind(subsampling="4:4:4"),
        kind(restart_marker_blocks=2),
    ]  # fmt: skip
    assert len(set(others)) == 5


def test_what_decoders_might_see_otherwise_goes_through_the_host() -> None:
    whole = jpeg()
    scan, frame = whole.index(b"\xff\xda"), whole.index(b"\xff\xc0")
    assert whole[scan + 4] == 3
    one_by_one = whole[: scan + 4] + b"\x01" + whole[scan + 5 :]
    assert jpeg_file(one_by_one) is None
    for marker in (b"\x00", b"\xd8", b"\xd9", b"\xdc"):
        hidden = b"\xff" + marker + b"\x00\x08" + b"\xff\xc0\xff\xff\xff\xff"
        assert jpeg_file(whole[:frame] + hidden + whole[frame:]) is None


@pytest.mark.parametrize("orientation", range(2, 9))
def test_what_exif_turns_goes_through_the_host(orientation: int) -> None:
    assert jpeg_file(jpeg(exif=exif(orientation))) is None


def test_so_does_everything_unusual() -> None:
    whole = jpeg()
    frame = whole.index(b"\xff\xc0")
    lossless = whole[: frame + 1] + b"\xc3" + whole[frame + 2 :]
    arithmetic = whole[: frame + 1] + b"\xc9" + whole[frame + 2 :]
    deep = whole[: frame + 4] + b"\x0c" + whole[frame + 5 :]
    huge = whole[: frame + 5] + b"\xff\xff\xff\xff" + whole[frame + 9 :]
    xmp = whole[:2] + b"\xff\xe1\x00\x2chttp://ns.adobe.com/xap tiff:Orientation=3 ..." + whole[2:]
    for data in (
        b"", b"\xff\xd8", encode(noise(4, 4)), jpeg("CMYK"), jpeg(keep_rgb=True), whole[:-40],
        whole[: frame + 3] + b"\xff\xd9", lossless, arithmetic, deep, huge, xmp,
    ):  # fmt: skip
        assert jpeg_file(data) is None
