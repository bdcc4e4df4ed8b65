"""`pl.DataParallel` in the place of DistributedDataParallel; the rest of the loop is plain PyTorch.

python examples/ddp_replacement.py
torchrun --nproc-per-node 2 examples/ddp_replacement.py --wire fp16 --algorithm ring
"""

import argparse

import torch
from torch import nn

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wire", default=None, help="fp16 or bf16; None: the gradients' own")
    parser.add_argument("--algorithm", default=None, help="such as ring; None: the backend's own")
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    with pl.init(device=arguments.device) as context:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(context.device)
        model = pl.DataParallel(net, wire=arguments.wire, algorithm=arguments.algorithm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + context.rank)
        inputs = torch.randn(64, 32, device=context.device)
        labels = inputs[:, :4].argmax(1)
        for step in range(20):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if context.is_main and step in (0, 19):
                print(f"{context.world_size} ranks, step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
