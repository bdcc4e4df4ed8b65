from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from interpreter_run import needs_triton, run_interpreted
from paceline.core.errors import ConfigError
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_eval_loader, create_train_loader
from paceline.data.on_device.batch_decoder import create_batch_decoder
from paceline.data.on_device.device_loader import chunks_of
from paceline.data.on_device.device_reader import check_settings
from paceline.data.settings import DataSettings
from paceline.data.sources.tar_shards import TarShards

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
CASES = Path(__file__).with_name("device_loader_cases.py")
ROOT = CASES.parent.parent.parent
TORCHVISION = importlib.util.find_spec("torchvision") is not None


@needs_triton
def test_the_loaders_with_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(CASES, at_least=5)


@pytest.mark.parametrize(
    ("length", "sizes"), [(0, []), (5, [5]), (64, [64]), (65, [33, 32]), (256, [64] * 4)]
)
def test_chunks_are_large_whatever_the_threads(length: int, sizes: list[int]) -> None:
    chunks = chunks_of(length)
    assert [last - first for first, last in chunks] == sizes
    assert [first for first, _ in chunks[1:]] == [last for _, last in chunks[:-1]]


def test_what_the_gpus_way_cannot_do_is_refused() -> None:
    check_settings(DataSettings(decoder="nvjpeg"))
    for changes, words in (
        ({"interpolation": "bicubic"}, "data.interpolation = 'bicubic'.* has only 'bilinear'"),
        ({"channels": 1, "mean": (0.5,), "std": (0.5,)}, "data.channels = 1.* has only 3"),
        ({"augment": "none"}, "data.augment = 'none'.*set data.decoder = 'auto'"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_settings(DataSettings(decoder="nvjpeg", **changes))


@pytest.mark.parametrize("name", ["nvjpeg", "dali"])
def test_without_a_gpu_it_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"data.decoder = '{name}': decodes on a GPU"):
        create_batch_decoder(name, torch.device("cpu"))


def test_a_missing_library_is_named() -> None:
    if TORCHVISION or importlib.util.find_spec("nvidia") is not None:
        pytest.skip("torchvision or a package of nvidia's is installed here")
    with pytest.raises(ConfigError, match="nvJPEG cannot be loaded .*libnvjpeg.so"):
        create_batch_decoder("nvjpeg", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="NVIDIA DALI cannot be imported"):
        create_batch_decoder("dali", torch.device("cuda", 0))


class Jpegs:
    """Smooth images, so that ways to interpolate colour hardly differ; one grey, one odd, one PNG, one
    cut short."""

    def __init__(self, count: int = 24) -> None:
        self.labels = np.arange(count, dtype=np.int64)
        self.classes = [str(label) for label in self.labels]
        self.files = [self._file(i) for i in range(count)]
        self.files[5] = self.files[5][: len(self.files[5]) // 2]

    def _file(self, i: int) -> bytes:
        height, width = 211 + 7 * i, 180 + 13 * i
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.sin((i + 1) * x / 90 + c) + np.cos(y / 70 - c) for c in range(3)]
        image = Image.fromarray((np.stack(waves, axis=2) * 60 + 127).astype(np.uint8))
        stream = io.BytesIO()
        image = image.convert("L") if i == 3 else image
        image.save(stream, "PNG" if i == 4 else "JPEG", quality=92, progressive=i == 6)
        return stream.getvalue()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> bytes:
        return self.files[i]

    def name(self, i: int) -> str:
        return f"{i}.jpg"

    def close(self) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nvjpeg_gives_the_threads_batches_within_a_few_levels() -> None:
    source, plan = Jpegs(), BatchPlan(24, 4, 16, 16, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off", "workers": 2}
    loaders = [
        create_train_loader(
            source, plan, DataSettings(decoder=decoder, **common), seed=1, rank=0, first_step=0,
            device=device,
        )
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
    assert "decoded on the host" in there.remark()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_evaluation_too() -> None:
    source, device = Jpegs(), torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off", "workers": 2}
    loaders = [
        create_eval_loader(
            source, DataSettings(decoder=decoder, **common), rank=0, world_size=1, batch_size=10,
            device=device,
        )
        for decoder in ("nvjpeg", "pillow")
    ]  # fmt: skip
    with loaders[0] as there, loaders[1] as here:
        for got, wanted in zip(there, here, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            assert got.corrupt == wanted.corrupt
            apart = (got.images.cpu().int() - wanted.images.int()).abs().float()
            assert float(apart.mean()) < 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_shards_are_read_in_bulk(tmp_path: Path, write_tar: Write) -> None:
    files = [file for i, file in enumerate(Jpegs().files) if i not in (4, 5)]
    samples = [(f"{i:03}.jpg", file) for i, file in enumerate(files)]
    labels = [(f"{i:03}.cls", str(i).encode()) for i in range(len(files))]
    pairs = [member for pair in zip(samples, labels, strict=True) for member in pair]
    source = TarShards([write_tar(tmp_path / "train-0.tar", pairs)])
    device = torch.device("cuda", torch.cuda.current_device())
    common = {"resident": "off", "workers": 2}
    loaders = [
        create_train_loader(
            source, BatchPlan(len(files), 8, 11, 11, 1), DataSettings(**settings, **common), seed=1,
            rank=0, first_step=0, device=device,
        )
        for settings in ({"decoder": "nvjpeg"}, {"decoder": "pillow"})
    ]  # fmt: skip
    with loaders[0] as there, loaders[1] as here:
        for got, wanted in zip(there, here, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            apart = (got.images.int() - wanted.images.int()).abs().float().mean(dim=(1, 2, 3))
            assert float(apart.max()) < 4.0
        assert there.remark() == ""
    source.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_image_is_right_while_the_training_is_busy() -> None:
    """The training's stream lags behind with work in memory that comes and goes, as a step's does; a
    decoder that wrote too early, or too late, would spoil some image of some round."""
    source, plan = Jpegs(), BatchPlan(24, 6, 24, 24, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    common = {"max_corrupt_share": 0.1, "resident": "off"}

    def batches(decoder: str, workers: int, busy: bool) -> list[torch.Tensor]:
        found = []
        settings = DataSettings(decoder=decoder, workers=workers, **common)
        loader = create_train_loader(
            source, plan, settings, seed=1, rank=0, first_step=0, device=device
        )
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
