"""What one kind of work beside a training costs it.

    python beside.py DIR LOAD,THREADS,STATES ... [--seconds 3]

DIR has shards of JPEGs. Loads: nothing; python (headers parsed, in Python alone); host (the region
decoder's loader); nvjpeg (files in memory decoded, no crop); device (the GPU's loader). STATES are
nvJPEG's. Prints the training's images/s, ResNet-50 at batch 256 on synthetic images, and the load's own.
With --default-stream the training is on CUDA's default stream. CUDA_DEVICE_MAX_CONNECTIONS is the
caller's to set.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from paceline.bench.input_ours import create_train_loader_of
from paceline.bench.input_row import InputRow
from paceline.bench.input_source import open_repeated
from paceline.bench.our_step import SyntheticBatches, build
from paceline.bench.step_row import StepRow
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.data.on_device import nvjpeg_handles
from paceline.data.on_device.jpeg_facts import jpeg_file
from paceline.data.on_device.nvjpeg import NvJpegDecoder
from paceline.data.on_device.own_stream import apart
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source
from paceline.train.step import TrainStep

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# A CPU is for trying the script out.
MODEL, BATCH, SIZE = ("resnet50", 256, 224) if DEVICE.type == "cuda" else ("resnet_tiny", 16, 32)
CHUNK = 64


class Counter:
    """Work done by threads, until it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._done = 0

    def add(self, images: int) -> None:
        with self._lock:
            self._done += images

    def rate(self, seconds: float, during: Callable[[], None]) -> float:
        began, before = time.perf_counter(), self._done
        during()
        return (self._done - before) / (time.perf_counter() - began)


def parse_headers(source: Source, counter: Counter) -> None:
    files = [source.read(i) for i in range(CHUNK)]
    while not counter.stopped.is_set():
        for data in files:
            jpeg_file(data)
        counter.add(CHUNK)


def decode_files(source: Source, decoder: NvJpegDecoder, counter: Counter) -> None:
    found = [jpeg_file(source.read(i)) for i in range(2 * CHUNK)]
    files = [file for file in found if file is not None][:CHUNK]
    stream = torch.cuda.Stream(DEVICE, priority=-1)
    with torch.cuda.device(DEVICE), torch.cuda.stream(stream):
        while not counter.stopped.is_set():
            decoder(files)
            stream.synchronize()
            counter.add(len(files))


def drain(row: InputRow, source: Source, counter: Counter) -> None:
    with create_train_loader_of(row, source) as loader:
        while not counter.stopped.is_set():
            counter.add(len(next(loader).labels))


@contextmanager
def load_of(name: str, threads: int, settings: DataSettings) -> Iterator[Counter]:
    counter, workers = Counter(), []
    source = open_repeated(settings, "train")
    if name == "python":
        workers = [(parse_headers, (source, counter))] * threads
    elif name == "nvjpeg":
        workers = [(decode_files, (source, NvJpegDecoder(DEVICE), counter))] * threads
    elif name in ("host", "device"):
        decoder = "region" if name == "host" else "nvjpeg"
        chosen = replace(settings, decoder=decoder, workers=threads)
        row = InputRow("ours", threads, chosen, "train", BATCH, DEVICE.type)
        workers = [(drain, (row, source, counter))]
    started = [threading.Thread(target=work, args=rest) for work, rest in workers]
    for thread in started:
        thread.start()
    try:
        yield counter
    finally:
        counter.stopped.set()
        for thread in started:
            thread.join()
        source.close()


def train(step: TrainStep, first: int, seconds: float) -> tuple[int, float]:
    """The next step's number, and images/s."""
    number, until = first, time.perf_counter() + seconds
    step.launch(number, 0.1)
    while time.perf_counter() < until:
        number += 1
        step.launch(number, 0.1)
        step.collect()
    step.collect()
    took = time.perf_counter() - until + seconds
    return number + 1, BATCH * (number + 1 - first) / took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("loads", nargs="+")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--default-stream", action="store_true")
    options = parser.parse_args()
    settings = RunConfig().with_values({"data.dir": options.directory, "data.resident": "off"}).data
    row = StepRow("load", "ours", MODEL, BATCH, SIZE, 1000, DEVICE.type, 10**6, 1, {})
    with ExitStack() as stack:
        group = stack.enter_context(Group(Topology(), RunConfig().comm, DEVICE))
        stack.enter_context(apart(DEVICE, "" if options.default_stream else "nvjpeg"))
        step, _ = build(row, group)
        step.loader = SyntheticBatches(row, DEVICE)
        number, _ = train(step, 0, 4.0)  # until it is recorded
        for spec in options.loads:
            name, threads, states = spec.split(",")
            nvjpeg_handles._STATES = int(states)
            with load_of(name, int(threads), settings) as counter:
                number, _ = train(step, number, 1.0)  # until the load is under way
                speeds: list[float] = []

                def during(first: int = number, speeds: list[float] = speeds) -> None:
                    speeds.extend(train(step, first, options.seconds))

                rate = counter.rate(options.seconds, during)
                number = int(speeds[0])
            print(f"{spec}: training {speeds[1]:,.0f} images/s, load {rate:,.0f}", flush=True)


if __name__ == "__main__":
    main()
