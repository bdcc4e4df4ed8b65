"""Checkpoints of runs, and weights of other programs."""

from __future__ import annotations

import hashlib
import io
import json
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from fuzz.mutate import mutate_tree, to_json
from fuzz.target import Seed, Target
from paceline.config import RunConfig
from paceline.custom_loop.checkpointer import Checkpointer
from paceline.models.pretrained import load_pretrained
from paceline.train.checkpoint import FORMAT, VERSION, Checkpoint, content_hash
from paceline.train.weights import checkpoint_weights
from train.runs import made_checkpoint


def weight_targets() -> Sequence[Target]:
    """A small model stands for all: files are compared with its keys and shapes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    small = model.state_dict()

    def pretrained(content: bytes, name: str, folder: Path) -> None:
        (folder / name).write_bytes(content)
        load_pretrained(model, folder / name)

    weights = [
        Seed("w.safetensors", save(small, metadata={"format": "pt"})),
        Seed("w.pt", _saved({"state_dict": small, "epoch": 3})),
        Seed("w.pth", _saved(small)),
        Seed("old.pt", _saved(small, _use_new_zipfile_serialization=False)),
    ]
    sound = bytes(made_checkpoint(config=RunConfig().to_tables()).to_bytes())
    return [
        Target("weights", weights, pretrained, 8),
        Target("checkpoint", [Seed("step-00000005.pt", sound)], _checkpoint, 5),
        Target("checkpoint signed", [Seed("step-00000005.pt", b"0" * 64)], _signed, 5),
        Target("own loop", [Seed("rank-0.pt", b"0" * 64)], _own_loop, 3),
    ]


def _saved(content: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def _use(content: bytes, name: str) -> None:
    """What `eval`, `export` and a resume read first."""
    found = Checkpoint.from_bytes(content, Path(name))
    assert found.step >= 0
    RunConfig.from_tables(found.config)
    checkpoint_weights(found)


def _checkpoint(content: bytes, name: str, folder: Path) -> None:
    _use(content, name)


def _own_loop(content: bytes, name: str, folder: Path) -> None:
    """A checkpoint of an own loop: damaged bytes, other values under right checksums, other manifests."""
    rng, net = random.Random(content), nn.Linear(3, 2)
    checkpointer = Checkpointer(folder)
    path = checkpointer.save(5, model=net, extra={"best": [1.5, np.zeros(2)]})
    manifest = json.loads((path / "manifest.json").read_bytes())
    kind = rng.randrange(3)
    if kind == 0:
        (path / "manifest.json").write_bytes(to_json(mutate_tree(rng, manifest, dates=False)))
    else:
        state = torch.load(path / name, weights_only=True)
        saved = _saved(mutate_tree(rng, state, dates=False)) if kind == 1 else content
        (path / name).write_bytes(saved)
        entry = {"bytes": len(saved), "sha256": hashlib.sha256(saved).hexdigest()}
        manifest["files"] = {name: entry}
        (path / "manifest.json").write_text(json.dumps(manifest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.restore(model=net)


def _signed(content: bytes, name: str, folder: Path) -> None:
    """Other values and types under a right checksum; the content only seeds the changes."""
    rng = random.Random(content)
    table = mutate_tree(rng, vars(made_checkpoint(config=RunConfig().to_tables())), dates=False)
    head = {"format": FORMAT, "version": VERSION, "sha256": content_hash(table)}
    _use(_saved({**head, **table}), name)
