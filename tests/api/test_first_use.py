"""The first hour of a new user, from an installed wheel: own photos, own model, resume, export, predict,
own loop. Torch comes from the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_runs import is_launchers

ROOT = Path(__file__).parents[2]
MY_NET = """
from torch import nn

def make(num_classes, in_channels=3):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )
"""
OWN_LOOP = """
import torch, torch.nn.functional as F
import paceline as pl

with pl.init() as here:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
    prepared = pl.prepare(net, optimizer="sgd", lr=0.01)
    model = pl.DataParallel(prepared.model)
    loader = pl.ImageLoader("photos", batch_size=8, image_size=32)
    for images, labels in loader:
        with prepared.autocast():
            loss = F.cross_entropy(model(images).float(), labels)
        prepared.backward(loss)
        prepared.step()
    print(pl.__file__)
    print("own loop", float(loss))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with photos of two classes, and Paceline installed beside it."""
    place = tmp_path_factory.mktemp("first-use")
    # pip builds a wheel of the tree and installs that.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--no-deps", "--no-build-isolation", "--no-compile", "--target"]
    subprocess.run([*install, str(place / "site"), str(ROOT)], check=True)
    chance = np.random.default_rng(0)
    for label, level in (("dark birds", 60), ("light fish", 180)):
        folder = place / "photos" / label
        folder.mkdir(parents=True)
        for number in range(16):
            pixels = chance.integers(level - 50, level + 50, (40, 50, 3)).astype(np.uint8)
            suffix = "jpg" if number % 2 else "png"
            Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    (place / "my_net.py").write_text(MY_NET)
    (place / "own_loop.py").write_text(OWN_LOOP)
    return place


def run(home: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    env |= {"PYTHONPATH": str(home / "site"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


# Runs several command lines and then a program, one after the other, and shows what each printed; torch
# is imported once.
COMMANDS = """
import contextlib, io, json, runpy, sys
from paceline.cli.app import run_command

printed = []
*commands, program = json.loads(sys.argv[1])
for words in commands:
    sys.argv = ["paceline", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run_command()
    if code:
        sys.exit(f"{words}: code {code}")
    printed.append(out.getvalue())
with contextlib.redirect_stdout(io.StringIO()) as out:
    runpy.run_path(*program, run_name="__main__")
print(json.dumps([*printed, out.getvalue()]))
"""


def paceline(home: Path, *commands: str) -> list[str]:
    """What each command, and the program that comes last, prints."""
    words = json.dumps([command.split() for command in commands])
    return list(json.loads(run(home, sys.executable, "-c", COMMANDS, words)))


TRAIN = (
    "train --data-dir photos --val-split 0.25 --image-size 32 --model my_net:make -b 8 --opt adamw"
)


def test_a_new_users_first_hour(home: Path) -> None:
    rate = f"{TRAIN} --lr 0.01 --output first"
    onnx = ["export first net.onnx --trust"] if _has("onnxscript") and _has("onnxruntime") else []
    dry, _, _, predicted, _, *exported, looped = paceline(
        home,
        f"{TRAIN} --dry-run",
        f"{rate} --epochs 2",
        f"{rate} --epochs 4 --resume first",
        "predict first photos --trust --csv found.csv",
        "export first net.pt2 --trust",
        *onnx,
        "own_loop.py",
    )
    assert "nothing was trained or written" in dry
    assert not (home / "runs").exists()
    assert all("in ONNX Runtime" in printed for printed in exported)
    line = predicted.splitlines()[0]
    assert "dark birds" in line or "light fish" in line
    assert len((home / "found.csv").read_text().splitlines()) == 33
    where, own = looped.splitlines()
    assert where.startswith(str(home / "site"))
    assert own.startswith("own loop")


def _has(package: str) -> bool:
    return find_spec(package) is not None
