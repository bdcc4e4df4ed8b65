"""What one kind of work beside a training costs it.

    python beside.py DIR LOAD,THREADS,STATES ... [--seconds 3]

DIR has shards of JPEGs. Loads: nothing; python (headers parsed, in Python alone); host (the region
decoder's loader); nvjpeg (files in memory decoded, no crop); device (the GPU's loader); probe (no load:
whether decoding waits for other streams). STATES are nvJPEG's. Prints the training's images/s, ResNet-50
at batch 256 on synthetic images, and the load's own.
With --default-stream the training is on CUDA's default stream. CUDA_DEVICE_MAX_CONNECTIONS is the
caller's to set.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

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

    @property
    def done(self) -> int:
        return self._done

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


def drain(row: InputRow, source: Source, stream: Any, counter: Counter) -> None:
    """On the training's stream, as a training takes its batches."""
    with on(stream), create_train_loader_of(row, source) as loader:
        print(f"  {loader.describe()}", flush=True)
        while not counter.stopped.is_set():
            counter.add(len(next(loader).labels))


def on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def probe(source: Source) -> None:
    """Whether decoding waits for work on CUDA's default stream, and on another."""
    found = [jpeg_file(source.read(i)) for i in range(CHUNK)]
    files = [file for file in found if file is not None]
    decoder, other = NvJpegDecoder(DEVICE), torch.cuda.Stream(DEVICE)
    side = torch.cuda.Stream(DEVICE, priority=-1)
    print(f"probe: {decoder.describe()}", flush=True)
    for name, stream in (("nothing", None), ("default", torch.cuda.default_stream(DEVICE)),
                         ("another", other)) * 2:  # fmt: skip
        torch.cuda.synchronize()
        began = time.perf_counter()
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(400_000_000)
        with torch.cuda.stream(side):
            decoder(files)
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        print(
            f"probe: {name} asleep: decoded after {1e3 * took:.1f} ms, all after {1e3 * whole:.1f}"
        )


@contextmanager
def load_of(
    name: str, threads: int, settings: DataSettings, stream: Any
) -> Iterator[tuple[Counter, list[threading.Thread]]]:
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
        workers = [(drain, (row, source, stream, counter))]
    started = [threading.Thread(target=work, args=rest) for work, rest in workers]
    for thread in started:
        thread.start()
    try:
        yield counter, started
    finally:
        counter.stopped.set()
        for thread in started:
            thread.join()
        source.close()
        gc.collect()


def train(step: TrainStep, first: int, seconds: float) -> tuple[int, float]:
    """The next step's number, and images/s. Ten steps at least: the first are recorded."""
    number, began = first, time.perf_counter()
    until = began + seconds
    step.launch(number, 0.1)
    while number - first < 10 or time.perf_counter() < until:
        number += 1
        step.launch(number, 0.1)
        step.collect()
    step.collect()
    return number + 1, BATCH * (number + 1 - first) / (time.perf_counter() - began)


def get_under_way(
    step: TrainStep, number: int, counter: Counter, threads: list[threading.Thread]
) -> int:
    """Trains until the load has done something; SystemExit where it does nothing."""
    until = time.perf_counter() + 30
    while threads and counter.done < 2 * BATCH:
        if time.perf_counter() > until or not all(thread.is_alive() for thread in threads):
            raise SystemExit("the load does nothing")
        number, _ = train(step, number, 0.2)
    return number


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
        number, _ = train(step, 0, 2.0)
        stream = torch.cuda.current_stream(DEVICE) if DEVICE.type == "cuda" else None
        for spec in options.loads:
            name, threads, states = spec.split(",")
            nvjpeg_handles._STATES = int(states)
            if name == "probe":
                probe(open_repeated(settings, "train"))
                continue
            with load_of(name, int(threads), settings, stream) as (counter, started):
                number = get_under_way(step, number, counter, started)
                speeds: list[float] = []

                def during(first: int = number, speeds: list[float] = speeds) -> None:
                    speeds.extend(train(step, first, options.seconds))

                rate = counter.rate(options.seconds, during)
                number = int(speeds[0])
            print(f"{spec}: training {speeds[1]:,.0f} images/s, load {rate:,.0f}", flush=True)


if __name__ == "__main__":
    main()
