"""Hybrid all-reduce under Hugging Face Accelerate.

    python examples/accelerate_hook.py --ranks 2                  # starts two ranks by torchrun
    python examples/accelerate_hook.py --ranks 2 --device cuda    # over Gloo, also on one GPU
    torchrun --nproc-per-node 8 examples/accelerate_hook.py --device cuda --backend nccl

Accelerate wraps the model in DistributedDataParallel; the hook is registered on what `prepare` returns,
because DistributedDataParallelKwargs only knows torch's own hooks. Needs `accelerate`; Paceline must be
installed, or PYTHONPATH be its `src`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm import HybridAllReduce, SizeTable

EPOCHS = 4


def train(device: str, backend: str, wire: str) -> str:
    """Returns the result in one line, which is the same on every rank."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    # Before Accelerate, which would choose NCCL on GPUs, and NCCL wants a GPU for each rank.
    dist.init_process_group(backend, device_id=gpu if backend == "nccl" else None)
    state = HybridAllReduce.from_env(SizeTable.two_way(eta_bytes=64 << 10), wire=wire)
    if gpu is not None:
        # Accelerate takes the GPU of this number; ranks that share one need the same.
        os.environ["LOCAL_RANK"] = str(gpu.index)
    options = DistributedDataParallelKwargs(bucket_cap_mb=1)
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[options])

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
    )
    data = TensorDataset(torch.randn(512, 32), torch.randint(0, 4, (512,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=32))
    carried = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def] # counts; else ddp_hook itself will do
        nonlocal carried
        carried += 1
        return HybridAllReduce.ddp_hook(state, bucket)

    model.register_comm_hook(state, hook)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    same = equal_weights(accelerator.unwrap_model(model))
    state.close()
    return (
        f"accelerate, {dist.get_world_size()} ranks on {accelerator.device.type}, {wire} wire: loss "
        f"{losses[0]:.3f} to {losses[-1]:.3f}, {carried} buckets, weights "
        f"{'equal' if same else 'DIFFER'} on all ranks"
    )


def equal_weights(model: nn.Module) -> bool:
    """Compares hashes of all weights among the ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2, help="started here, unless torchrun does")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--wire", default="float32", choices=["float32", "float16", "bfloat16"])
    arguments = parser.parse_args()
    if arguments.backend == "nccl" and arguments.device == "cpu":
        parser.error("--backend nccl needs --device cuda")
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(arguments.ranks)]
        os.execv(sys.executable, [sys.executable, *torchrun, *ranks, __file__, *sys.argv[1:]])
    line = train(arguments.device, arguments.backend, arguments.wire)
    if dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
    dist.destroy_process_group()
    sys.exit("DIFFER" in line)


if __name__ == "__main__":
    main()
