"""Fine-tunes weights of an earlier run on a part of the data: python examples/fine_tuning.py [EPOCHS]

The first run trains on all embedded images. The second starts from its weights, keeps the first layers as
they are, trains the rest at a low rate that falls towards the input, and stops early.
"""

import sys

import paceline as pl

SMALL_STEPS = {"optim.warmup_epochs": 0.5, "run.smoothing": 0.0}


def main(epochs: int) -> tuple[pl.Result, pl.Result]:
    first = pl.Trainer(recipe="quickstart", epochs=epochs).fit()
    second = pl.Trainer(
        recipe="quickstart",
        pretrained=first.weights,
        epochs=epochs,
        lr=0.02,
        callbacks=[pl.EarlyStopping(patience=2)],
        settings={"model.freeze": ["conv1.*", "layer1.*"], "optim.layer_decay": 0.8, **SMALL_STEPS},
    ).fit()
    return first, second


if __name__ == "__main__":
    before, after = main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    print(f"top-1 {before.top1:.2f} % before, {after.top1:.2f} % after fine-tuning")
