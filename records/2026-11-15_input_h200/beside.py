"""What one kind of work beside a training costs it.

    python beside.py DIR LOAD,THREADS,STATES ... [--seconds 3]

DIR has shards of JPEGs. Loads: nothing; python (headers parsed, in Python alone); host (the region
decoder's loader); nvjpeg (files in memory decoded, no crop); device (the GPU's loader); probe (no load:
whether decoding waits for other streams). STATES are nvJPEG's. Prints the training's images/s, ResNet-50
at batch 256 on synthetic images, how long a step is in `launch` and in `collect` (a training that hardly
waits in `collect` keeps the GPU waiting), and the load's own images/s.
The training is on a stream of its own, of --priority, or with --default-stream on CUDA's default one.
--switch-interval is Python's. CUDA_DEVICE_MAX_CONNECTIONS is the caller's to set. --trace writes what a
profiler saw of a few steps, one file a load.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from paceline.bench.input_row import InputRow
from paceline.bench.input_source import open_repeated
from paceline.bench.our_step import SyntheticBatches, build
from paceline.bench.step_row import StepRow

from paceline.bench.input_ours import create_train_loader_of
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.data.on_device import nvjpeg_handles
from paceline.data.on_device.jpeg_facts import jpeg_file
from paceline.data.on_device.nvjpeg import NvJpegDecoder
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
    print(f"probe: {torch.cuda.mem_get_info()[0] / 2**20:,.0f} MiB free before", flush=True)
    decoder, other = NvJpegDecoder(DEVICE), torch.cuda.Stream(DEVICE)
    side = torch.cuda.Stream(DEVICE, priority=-1)
    print(f"probe: {decoder.describe()}", flush=True)
    torch.cuda.synchronize()
    print(f"probe: {torch.cuda.mem_get_info()[0] / 2**20:,.0f} MiB free", flush=True)
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


def train(step: TrainStep, first: int, seconds: float, least: int = 10) -> tuple[int, float, str]:
    """The next step's number, images/s, and where the host's time goes. Ten steps at least: the first are
    recorded."""
    number, began = first, time.perf_counter()
    until = began + seconds
    launching, collecting = [], []
    step.launch(number, 0.1)
    while number - first < least or time.perf_counter() < until:
        number += 1
        start = time.perf_counter()
        step.launch(number, 0.1)
        middle = time.perf_counter()
        step.collect()
        launching.append(middle - start)
        collecting.append(time.perf_counter() - middle)
    step.collect()
    rate = BATCH * (number + 1 - first) / (time.perf_counter() - began)
    host = (
        f"launch {1e3 * statistics.mean(launching):.1f} ms (worst {1e3 * max(launching):.1f}), "
        f"collect {1e3 * statistics.mean(collecting):.1f} ms"
    )
    return number + 1, rate, host


def traced(step: TrainStep, first: int, path: str) -> int:
    """A few steps under torch's profiler; the next step's number."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        number, _, _ = train(step, first, 0.0, least=5)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    return number


def get_under_way(
    step: TrainStep, number: int, counter: Counter, threads: list[threading.Thread]
) -> int:
    """Trains until the load has done something; SystemExit where it does nothing."""
    until = time.perf_counter() + 30
    while threads and counter.done < 2 * BATCH:
        if time.perf_counter() > until or not all(thread.is_alive() for thread in threads):
            raise SystemExit("the load does nothing")
        number, _, _ = train(step, number, 0.2)
    return number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("loads", nargs="+")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--default-stream", action="store_true")
    parser.add_argument("--priority", type=int, default=0)
    parser.add_argument("--switch-interval", type=float, default=0.005)
    parser.add_argument("--trace", default="")
    parser.add_argument("--side", type=int, default=nvjpeg_handles._SIDE)
    parser.add_argument("--connections", type=int, default=0, help="set when CUDA was asked before")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_interval)
    nvjpeg_handles._SIDE = options.side
    if options.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
    settings = RunConfig().with_values({"data.dir": options.directory, "data.resident": "off"}).data
    row = StepRow("load", "ours", MODEL, BATCH, SIZE, 1000, DEVICE.type, 10**6, 1, {})
    with ExitStack() as stack:
        group = stack.enter_context(Group(Topology(), RunConfig().comm, DEVICE))
        if not options.default_stream and DEVICE.type == "cuda":
            chosen = torch.cuda.Stream(DEVICE, priority=options.priority)
            stack.enter_context(torch.cuda.stream(chosen))
        step, _ = build(row, group)
        step.loader = SyntheticBatches(row, DEVICE)
        number, _, _ = train(step, 0, 2.0)
        stream = torch.cuda.current_stream(DEVICE) if DEVICE.type == "cuda" else None
        for spec in options.loads:
            name, threads, states = spec.split(",")
            nvjpeg_handles._STATES = int(states)
            if name == "probe":
                probe(open_repeated(settings, "train"))
                continue
            with load_of(name, int(threads), settings, stream) as (counter, started):
                number = get_under_way(step, number, counter, started)
                before = counter.done
                began = time.perf_counter()
                number, speed, host = train(step, number, options.seconds)
                rate = (counter.done - before) / (time.perf_counter() - began)
                print(
                    f"{spec}: training {speed:,.0f} images/s, {host}, load {rate:,.0f}", flush=True
                )
                if options.trace:
                    number = traced(
                        step, number, f"{options.trace}-{spec.replace(',', '-')}.json.gz"
                    )


if __name__ == "__main__":
    main()
