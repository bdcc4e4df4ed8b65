"""Which work of rank 0 ends while a collective of rank 1, on the same GPU under MPS, waits for rank 0.

    python -m paceline.bench.one_gpu --ranks 2 --restart-mps -- kernels_beside_nccl.py
    python kernels_beside_nccl.py --names        # names and grids of the kernels; one process, no MPS

For each piece of work: rank 1 starts an all-reduce; rank 0 then starts the work and watches it for 1.5 s;
then rank 0 joins the all-reduce from another thread and stream, and watches the work again.
"""

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

faulthandler.enable()
LIMIT_S = 1.5
# Work whose name holds ONLY, and does not hold WITHOUT.
ONLY, WITHOUT = os.environ.get("ONLY", ""), os.environ.get("WITHOUT", "")
torch.cuda.set_device(0)
torch.backends.cudnn.benchmark = True


def batch_norm(shape, cudnn, backward):
    half = {"device": "cuda", "dtype": torch.float16}
    x = torch.randn(shape, **half).to(memory_format=torch.channels_last).requires_grad_()
    w, b, mean, var = (torch.ones(shape[1], device="cuda") for _ in range(4))
    w.requires_grad_(), b.requires_grad_()

    def forward():
        torch.backends.cudnn.enabled = cudnn
        try:
            return F.batch_norm(x, mean, var, w, b, training=True)
        finally:
            torch.backends.cudnn.enabled = True

    if not backward:
        return forward
    y = forward()
    g = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w, b), g, retain_graph=True)


def convolution(shape, filters, kernel, backward):
    half = {"device": "cuda", "dtype": torch.float16}
    x = torch.randn(shape, **half).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(filters, shape[1], kernel, kernel, **half)
    w = w.to(memory_format=torch.channels_last).requires_grad_()
    run = lambda: F.conv2d(x, w, padding=kernel // 2)  # noqa: E731
    if not backward:
        return run
    y = run()
    g = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w), g, retain_graph=True)


def work():
    """Name, what makes it, whether it has run before."""
    for shape in ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 2048, 7, 7)):
        text = "×".join(map(str, shape))
        for back in (False, True):
            side = "backward" if back else "forward"
            for cudnn in (False, True):
                name = f"batch norm {side} {text}, {'cudnn' if cudnn else 'torch'}"
                yield name, lambda s=shape, c=cudnn, k=back: batch_norm(s, c, k), True
    for args in (((64, 64, 56, 56), 64, 3), ((64, 256, 56, 56), 64, 1), ((64, 512, 7, 7), 512, 3)):
        for back in (False, True):
            name = f"convolution {'backward' if back else 'forward'} {args}"
            yield name, lambda a=args, k=back: convolution(*a, k), True
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    out = torch.empty_like(a)
    yield "matmul 8192", lambda: lambda: torch.mm(a, a, out=out), True
    yield "add, 134 MB", lambda: lambda: torch.add(a, a, out=out), True
    yield "sum to host (.item)", lambda: lambda: a.sum().item(), True
    yield "first use of a kernel", lambda: lambda: torch.special.bessel_j0(a.float()), False
    byte = torch.uint8
    yield "cudaMalloc, 3 GB", lambda: lambda: torch.empty(3 << 30, dtype=byte, device="cuda"), False
    yield "cudaFree (empty_cache)", lambda: lambda: torch.cuda.empty_cache(), False
    pinned = partial(torch.empty, 1 << 26, dtype=byte, pin_memory=True)
    yield "cudaHostAlloc, 64 MB", lambda: pinned, False
    new = ((64, 96, 30, 30), 80, 3)
    yield "convolution not seen before (benchmark)", lambda: convolution(*new, False), False


def names():
    from torch.profiler import ProfilerActivity, profile

    for name, make, warm in work():
        if not name.startswith(("batch", "conv")) or not warm:
            continue
        run = make()
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        trace = Path(tempfile.mkdtemp()) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        rows = json.loads(trace.read_text())["traceEvents"]
        print(name)
        for row in rows:
            if row.get("cat") == "kernel":
                a = row["args"]
                print(
                    f"    grid {a['grid']} block {a['block']} registers {a['registers per thread']} "
                    f"shared {a['shared memory']} blocks/SM {a.get('blocks per SM')} "
                    f"{row['dur']:.0f} us {row['name'][:130]}"
                )


def ranks():
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    store = dist.distributed_c10d._get_default_store()
    big = torch.ones(25_557_032, device="cuda")
    dist.all_reduce(big)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_S", "60")), exit=True)
    chosen = [row for row in work() if ONLY in row[0] and not (WITHOUT and WITHOUT in row[0])]
    for number, (name, make, warm) in enumerate(chosen):
        if rank == 1:
            store.wait([f"warm{number}"])
            pending = dist.all_reduce(big, async_op=True)
            time.sleep(0.03)
            store.set(f"waits{number}", "1")
            pending.wait()
            torch.cuda.synchronize()
            store.wait([f"joined{number}"])
            continue
        run = make()
        if warm:
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        store.set(f"warm{number}", "1")
        store.wait([f"waits{number}"])
        ended, joined, event = threading.Event(), [], torch.cuda.Event()

        def join(ended=ended, joined=joined):
            ended.wait(LIMIT_S)
            torch.cuda.set_device(0)
            joined.append(time.perf_counter())
            with torch.cuda.stream(side):
                dist.all_reduce(big)

        thread = threading.Thread(target=join)
        thread.start()
        begun = time.perf_counter()
        run()
        launched = time.perf_counter()
        event.record()
        while not event.query():
            time.sleep(0.0005)
            if joined and time.perf_counter() - joined[0] > 5:
                print(
                    f"{name:<52} STUCK, also 5 s after rank 0 joined; host call "
                    f"{(launched - begun) * 1e3:.1f} ms",
                    flush=True,
                )
                os._exit(3)
        done = time.perf_counter()
        ended.set()
        thread.join()
        torch.cuda.synchronize()
        store.set(f"joined{number}", "1")
        host = (launched - begun) * 1e3
        if done < joined[0]:
            said = f"ended after {(done - begun) * 1e3:.1f} ms"
        else:
            said = (
                f"WAITED {LIMIT_S:g} s, ended {(done - joined[0]) * 1e3:.1f} ms after rank 0 joined"
            )
        print(f"{name:<52} {said}; host call {host:.1f} ms", flush=True)
    dist.destroy_process_group()


names() if "--names" in sys.argv else ranks()
