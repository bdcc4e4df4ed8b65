from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.small import FileSource, MemorySource, encode, eval_loader, train_loader, write_tar
from interpreter_run import needs_triton, run_interpreted
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan, DataSettings
from paceline.data.device import gpu_decoder
from paceline.data.device.gpu_decoder import (
    check_crop_kernel,
    check_source,
    chunks_of,
)
from paceline.data.sources.index_store import open_shards

CPU = torch.device("cpu")
CASES = Path(__file__).with_name("gpu_decoder_cases.py")
ROOT = CASES.parent.parent.parent
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.data.device.kernels import crop_kernel as kernel

for cutout in (0, 16):
    values = {"SIZE": 224, "CUTOUT": cutout, "BLOCK": 256}
    kinds = {"table": "*i64", "boxes": "*fp64", "out": "*u8", **dict.fromkeys(values, "constexpr")}
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    triton.compile(ASTSource(kernel, kinds, constants, {}), target=GPUTarget("cuda", 90, 32))
"""


@needs_triton
def test_the_decoder_with_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(CASES, at_least=9)


@needs_triton
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("length", "sizes"), [(0, []), (5, [5]), (64, [64]), (65, [33, 32]), (256, [64] * 4)]
)
def test_chunks_are_large_whatever_the_threads(length: int, sizes: list[int]) -> None:
    chunks = chunks_of(length)
    assert [last - first for first, last in chunks] == sizes
    assert [first for first, _ in chunks[1:]] == [last for _, last in chunks[:-1]]


def test_what_the_gpus_way_cannot_do_is_refused() -> None:
    for changes, words in (
        ({"interpolation": "bicubic"}, "data.interpolation = 'bicubic'.* has only 'bilinear'"),
        ({"channels": 1, "mean": (0.5,), "std": (0.5,)}, "data.channels = 1.* has only 3"),
        ({"augment": "none"}, "data.augment = 'none'.*set data.decoder = 'auto'"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataSettings(decoder="nvjpeg", **changes)


def test_pixels_are_refused() -> None:
    settings, source = DataSettings(decoder="nvjpeg"), MemorySource(3)
    check_source(source, settings)
    source.read = lambda i: np.zeros((4, 4, 3), dtype=np.uint8)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .* raw pixels; set"):
        check_source(source, settings)


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs? Triton: the package .*set data.decoder = 'auto'"):
        check_crop_kernel(CPU, size=4, cutout=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, kernels can be built")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_a_kernel_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .*no kernel can be built: "):
        check_crop_kernel(CPU, size=4, cutout=0)


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoder, "_stretches", lambda *_: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="a kernel gave a wrong result"):
        check_crop_kernel(CPU, size=4, cutout=0)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_real_sizes_are_pillows_within_a_level() -> None:
    from paceline.data.device import kernels

    draw = np.random.default_rng(5)
    size, held, wanted = 224, [], []
    table, doubles = kernels.new_table(40)
    for i in range(40):
        width, height = draw.integers(30, 900, 2).tolist()
        image = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        left, top = draw.uniform(0, width * 0.7), draw.uniform(0, height * 0.7)
        box = (left, top, draw.uniform(left + 5, width), draw.uniform(top + 5, height))
        flip = bool(draw.integers(2))
        planes = image.transpose(2, 0, 1).copy()
        held.append(torch.from_numpy(planes).cuda())
        table[i, :7] = (held[-1].data_ptr(), height, width, flip, i, 0, 0)
        doubles[i, kernels.BOX :] = box
        square = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box)
        wanted.append(
            np.asarray(square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else square)
        )
    out = torch.empty((40, size, size, 3), dtype=torch.uint8, device="cuda")
    kernels.crop_into(out, torch.from_numpy(table).cuda(), cutout=0)
    apart = np.abs(out.cpu().numpy().astype(int) - np.stack(wanted).astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.25  # Pillow sums tall images down first


def jpeg(i: int) -> bytes:
    height, width = 211 + 7 * i, 180 + 13 * i
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin((i + 1) * x / 90 + c) + np.cos(y / 70 - c) for c in range(3)]
    image = Image.fromarray((np.stack(waves, axis=2) * 60 + 127).astype(np.uint8))
    image = image.convert("L") if i == 3 else image
    return encode(image, "PNG" if i == 4 else "JPEG", quality=92, progressive=i == 6)


def jpegs() -> FileSource:
    """Smooth images, so that ways to interpolate colour hardly differ; one grey, one odd, one PNG, one
    cut short."""
    files = [jpeg(i) for i in range(24)]
    files[5] = files[5][: len(files[5]) // 2]
    return FileSource(files)


@pytest.mark.gpu
def test_on_a_gpu_nvjpeg_gives_the_threads_batches_within_a_few_levels() -> None:
    source, plan = jpegs(), BatchPlan(24, 4, 16, 16, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off", "workers": 2}
    loaders = [
        train_loader(source, plan, DataSettings(decoder=decoder, **common), seed=1, device=device)
        for decoder in ("nvjpeg", "pillow")
    ]  # fmt: skip
    with loaders[0] as there, loaders[1] as here:
        for got, wanted in zip(there, here, strict=True):
            assert got.images.is_cuda
            assert got.labels.tolist() == wanted.labels.tolist()
            assert got.corrupt == wanted.corrupt
            apart = (got.images.int() - wanted.images.int()).abs().float()
            assert float(apart.mean()) < 1.5
            assert float(apart.max()) <= 16
    assert "nvJPEG" in there.describe()
    assert "decoded on the host" in there.note()


@pytest.mark.gpu
def test_on_a_gpu_evaluation_too() -> None:
    source, device = jpegs(), torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off", "workers": 2}
    loaders = [
        eval_loader(source, DataSettings(decoder=decoder, **common), batch_size=10, device=device)
        for decoder in ("nvjpeg", "pillow")
    ]  # fmt: skip
    with loaders[0] as there, loaders[1] as here:
        for got, wanted in zip(there, here, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            assert got.corrupt == wanted.corrupt
            apart = (got.images.cpu().int() - wanted.images.int()).abs().float()
            assert float(apart.mean()) < 1.5


@pytest.mark.gpu
def test_on_a_gpu_shards_are_read_in_bulk(tmp_path: Path) -> None:
    files = [file for i, file in enumerate(jpegs().files) if i not in (4, 5)]
    samples = [(f"{i:03}.jpg", file) for i, file in enumerate(files)]
    labels = [(f"{i:03}.cls", str(i).encode()) for i in range(len(files))]
    pairs = [member for pair in zip(samples, labels, strict=True) for member in pair]
    source = open_shards([write_tar(tmp_path / "train-0.tar", pairs)])
    device = torch.device("cuda", torch.cuda.current_device())
    common, plan = {"resident": "off", "workers": 2}, BatchPlan(len(files), 8, 11, 11, 1)
    loaders = [
        train_loader(source, plan, DataSettings(decoder=decoder, **common), seed=1, device=device)
        for decoder in ("nvjpeg", "pillow")
    ]
    with loaders[0] as there, loaders[1] as here:
        for got, wanted in zip(there, here, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            apart = (got.images.int() - wanted.images.int()).abs().float().mean(dim=(1, 2, 3))
            assert float(apart.max()) < 4.0
        assert there.note() == ""
    source.close()


@pytest.mark.gpu
def test_on_a_gpu_every_image_is_right_while_the_training_is_busy() -> None:
    """The training's stream lags behind with work in memory that comes and goes, as a step's does; a
    decoder that wrote too early, or too late, would spoil some image of some round."""
    source, plan = jpegs(), BatchPlan(24, 6, 24, 24, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off"}

    def batches(decoder: str, workers: int, busy: bool) -> list[torch.Tensor]:
        found = []
        settings = DataSettings(decoder=decoder, workers=workers, **common)
        loader = train_loader(source, plan, settings, seed=1, device=device)
        with loader:
            for batch in loader:
                if busy:
                    torch.cuda._sleep(50_000_000)
                    for _ in range(8):
                        noise = torch.full((3, 600, 800), 255, dtype=torch.uint8, device=device)
                        noise.add_(1)
                        del noise
                found.append(batch.images.clone())
                del batch
        return [images.cpu() for images in found]

    wanted, quiet = batches("pillow", 2, busy=False), batches("nvjpeg", 1, busy=False)
    for workers in (1, 4):
        got = batches("nvjpeg", workers, busy=True)
        for one, other, host in zip(got, quiet, wanted, strict=True):
            assert torch.equal(one, other)
            apart = (one.int() - host.int()).abs().float().mean(dim=(1, 2, 3))
            assert float(apart.max()) < 4.0  # of every image, not of all together
