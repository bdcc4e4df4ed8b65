"""An own training loop from Paceline's parts: any launcher, half precision on a GPU, exact resume.

python examples/own_loop.py --epochs 2
torchrun --nproc-per-node 2 examples/own_loop.py --epochs 4   # again: continues after the last epoch
srun examples/own_loop.py        # or mpirun, with MASTER_ADDR set
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="own-loop-checkpoints")
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()

    with pl.init(device=arguments.device) as context:
        torch.manual_seed(context.rank)  # for dropout; the weights are those of rank 0
        images = torch.randn(512, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
        sampler = DistributedSampler(data, context.world_size, context.rank, seed=1)
        loader = DataLoader(data, batch_size=32, sampler=sampler)

        net = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 2),
        ).to(context.device)  # fmt: skip
        prepared = pl.prepare(net, optimizer="lars", lr=2.0, precision="auto")
        model = pl.DataParallel(prepared.model)
        checkpointer = pl.Checkpointer(arguments.folder)
        start = checkpointer.restore(prepared=prepared) or 0

        for epoch in range(start, arguments.epochs):
            sampler.set_epoch(epoch)
            for pixels, labels in loader:
                pixels, labels = pixels.to(context.device), labels.to(context.device)
                with prepared.autocast():
                    loss = F.cross_entropy(model(pixels).float(), labels)
                prepared.backward(loss)
                prepared.step()
            checkpointer.save(epoch + 1, prepared=prepared)
            if context.is_main:
                weights = f"weights {net[0].weight.sum().item():.9g}"
                ranks = f"{context.world_size} ranks, {prepared.precision}"
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {ranks}, {weights}")


if __name__ == "__main__":
    main()
