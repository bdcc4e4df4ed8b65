"""Trains a model of timm and classifies with it: python examples/timm_model.py [EPOCHS]

Needs `pip install timm`. On a GPU the model is compiled and its steps are captured as CUDA graphs if
it allows that; the first lines of the output say what was chosen. The embedded images have 28 pixels and
are scaled to 32: the model divides the size by 32.
"""

import sys

import numpy as np

import paceline as pl


def main(epochs: int, name: str = "timm:convnext_atto") -> list[pl.Prediction]:
    trainer = pl.Trainer(
        name, recipe="quickstart", optimizer="adamw", lr=1e-3, epochs=epochs, image_size=32
    )
    trainer.fit()
    return trainer.predict([np.zeros((28, 28, 3), dtype=np.uint8)], top=2)


if __name__ == "__main__":
    print(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)[0])
