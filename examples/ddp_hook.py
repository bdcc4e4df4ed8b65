"""Hybrid all-reduce as a communication hook of plain DistributedDataParallel.

    python examples/ddp_hook.py --ranks 2                      # starts two ranks by torchrun
    torchrun --nproc-per-node 4 examples/ddp_hook.py --wire float16
    python examples/ddp_hook.py --ranks 2 --device cuda        # over Gloo, also several ranks on one GPU
    torchrun --nproc-per-node 8 examples/ddp_hook.py --device cuda --backend nccl   # a GPU for each rank

A small network learns random data. The last line tells the loss, how many buckets the hook carried, and
whether all ranks hold the same weights. Paceline must be installed, or PYTHONPATH be its `src`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import HybridAllReduce, SizeTable

STEPS = 30


def train(device: torch.device, wire: str) -> str:
    """Returns the result in one line, which is the same on every rank."""
    torch.manual_seed(dist.get_rank())  # DDP gives every rank the weights of rank 0
    net = nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
    )
    model = DistributedDataParallel(net.to(device), bucket_cap_mb=0.1)

    # Small buckets go by the hierarchical algorithm, from 64 KiB on by the ring. `paceline tune` measures
    # a table for a cluster; SizeTable.read loads it.
    state = HybridAllReduce.from_env(SizeTable.two_way(eta_bytes=64 << 10), wire=wire)
    carried = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def] # counts; else ddp_hook itself will do
        nonlocal carried
        carried += 1
        return HybridAllReduce.ddp_hook(state, bucket)

    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = torch.randn(64, 32, device=device)
    labels = torch.randint(0, 4, (64,), device=device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same = equal_weights(net)
    state.close()
    return (
        f"{dist.get_world_size()} ranks on {device.type}, {wire} wire: loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}, {carried} buckets, weights {'equal' if same else 'DIFFER'} on all ranks"
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
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        arguments.backend, device_id=device if arguments.backend == "nccl" else None
    )
    line = train(device, arguments.wire)
    if dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
    dist.destroy_process_group()
    sys.exit("DIFFER" in line)


if __name__ == "__main__":
    main()
