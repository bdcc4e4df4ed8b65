"""Hybrid all-reduce under Lightning, through DDPStrategy's `ddp_comm_state` and `ddp_comm_hook`.

    python examples/lightning_hook.py --ranks 2                   # starts two ranks by torchrun
    python examples/lightning_hook.py --ranks 2 --device cuda     # over Gloo, also on one GPU
    torchrun --nproc-per-node 8 examples/lightning_hook.py --device cuda --backend nccl

Lightning registers hooks on GPUs only; on CPUs the callback below does it. Needs `lightning`; Paceline
must be installed, or PYTHONPATH be its `src`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm import HybridAllReduce, SizeTable

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

EPOCHS = 4


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class RegisterOnCpu(pl.Callback):
    def __init__(self, state: HybridAllReduce, hook: Any) -> None:
        self._state, self._hook = state, hook

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cpu":
            trainer.strategy.model.register_comm_hook(self._state, self._hook)


def train(device: str, backend: str, wire: str) -> str:
    """Returns the result in one line, which is the same on every rank."""
    # Before Lightning, because the state needs it; Lightning takes what it finds.
    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, device_id=gpu if backend == "nccl" else None)
    state = HybridAllReduce.from_env(SizeTable.two_way(eta_bytes=64 << 10), wire=wire)
    carried = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def] # counts; else ddp_hook itself will do
        nonlocal carried
        carried += 1
        return HybridAllReduce.ddp_hook(state, bucket)

    # One entry for each rank of this node; ranks may share a GPU.
    places = range(int(os.environ["LOCAL_WORLD_SIZE"]))
    devices = [torch.device("cpu")] * len(places)
    if device == "cuda":
        devices = [torch.device("cuda", place % torch.cuda.device_count()) for place in places]
    strategy = DDPStrategy(
        parallel_devices=devices,
        process_group_backend=backend,
        ddp_comm_state=state,
        ddp_comm_hook=hook,
        bucket_cap_mb=1,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[RegisterOnCpu(state, hook)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 32), torch.randint(0, 4, (512,)))
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=32))
    same = equal_weights(net)
    state.close()
    return (
        f"lightning, {dist.get_world_size()} ranks on {device}, {wire} wire: loss {net.losses[0]:.3f} "
        f"to {net.losses[-1]:.3f}, {carried} buckets, weights {'equal' if same else 'DIFFER'} on all "
        "ranks"
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
