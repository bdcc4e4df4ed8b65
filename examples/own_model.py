"""Trains a model of your own on the embedded images: python examples/own_model.py [EPOCHS]"""

import sys

from torch import nn

import paceline as pl


def make(num_classes: int, in_channels: int) -> nn.Module:
    """Any module that maps images (N × C × H × W) to class scores (N × classes)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 3, stride=2, padding=1), nn.GELU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, num_classes),
    )  # fmt: skip


def main(epochs: int) -> pl.Result:
    trainer = pl.Trainer(make, optimizer="adamw", lr=1e-3, epochs=epochs)
    return trainer.fit()


if __name__ == "__main__":
    result = main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    print(f"top-1 {result.top1:.2f} %, report {result.report}")
