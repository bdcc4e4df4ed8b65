"""Makes the embedded data set from the original Fashion-MNIST files.

In: the folder with the four idx files (Debian's package `dataset-fashion-mnist` puts them into
/usr/share/datasets/fashion-mnist). Out: tar shards of PNG and .cls files, `classes.json` and the
licence, in the layout that users' own data has. The same input gives the same bytes: times, owners and
names are fixed (another build of zlib may compress differently; the images stay the same).

    python tools/make_embedded_data.py FOLDER [--output src/paceline/data/embedded]
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
TRAIN_PER_CLASS, VAL_PER_CLASS = 1200, 200
TRAIN_SHARDS, VAL_SHARDS = 4, 1
LIMIT_BYTES = 8_000_000

LICENCE = """\
The images in this folder are a part of Fashion-MNIST (https://github.com/zalandoresearch/fashion-mnist):
the first 1,200 training and 200 test images of each class, stored as PNG.

The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction, including
without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN
NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY,
WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def read_idx(path: Path) -> Pixels:
    """An idx file: two zero bytes, the type (8: unsigned bytes), the rank, each length, the values."""
    content = gzip.decompress(path.read_bytes())
    zeros, kind, rank = struct.unpack_from(">HBB", content)
    if zeros or kind != 8:
        sys.exit(f"{path}: not an idx file of unsigned bytes")
    shape = struct.unpack_from(f">{rank}I", content, 4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def first_of_each_class(labels: Pixels, count: int) -> npt.NDArray[np.int64]:
    """Places of the first `count` samples of each class, in the order of the file."""
    chosen = [np.flatnonzero(labels == number)[:count] for number in range(len(CLASSES))]
    return np.sort(np.concatenate(chosen))


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time, owner and group are 0 unless set
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def make_shard(path: Path, images: Pixels, labels: Pixels, first_key: int) -> None:
    """One .tar.gz; keys count through the shards of a split."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for key, (image, label) in enumerate(zip(images, labels, strict=True), first_key):
            png = io.BytesIO()
            Image.fromarray(image).save(png, "PNG", optimize=True)
            add_member(archive, f"{key:06d}.png", png.getvalue())
            add_member(archive, f"{key:06d}.cls", str(label).encode("ascii"))
    with (
        path.open("wb") as file,
        # An empty name and time 0: nothing of the moment or the machine gets into the header.
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed,
    ):
        packed.write(plain.getvalue())


def make_split(
    folder: Path, output: Path, prefix: str, split: str, count: int, shards: int
) -> None:
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
    chosen = first_of_each_class(labels, count)
    size = len(chosen) // shards
    for number in range(shards):
        part = chosen[number * size : (number + 1) * size]
        make_shard(
            output / f"{split}-{number:04d}.tar.gz", images[part], labels[part], number * size
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="folder with the four Fashion-MNIST idx .gz files"
    )
    default = Path(__file__).resolve().parents[1] / "src/paceline/data/embedded"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    make_split(arguments.folder, output, "train", "train", TRAIN_PER_CLASS, TRAIN_SHARDS)
    make_split(arguments.folder, output, "t10k", "val", VAL_PER_CLASS, VAL_SHARDS)
    names = [{"cls": number, "name": name} for number, name in enumerate(CLASSES)]
    (output / "classes.json").write_text(json.dumps(names, indent=0) + "\n", encoding="utf-8")
    (output / "LICENSE-fashion-mnist").write_text(LICENCE, encoding="utf-8")
    total = sum(path.stat().st_size for path in output.iterdir())
    sys.stdout.write(f"{output}: {total:,} bytes\n")
    if total >= LIMIT_BYTES:
        sys.exit(f"more than the {LIMIT_BYTES:,} bytes that may be embedded")


if __name__ == "__main__":
    main()
