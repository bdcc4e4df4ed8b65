"""Public names: their documented examples run, importing them starts no CUDA, the planner no torch."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.core.errors import ConfigError
from programs import run_python

OWN = {
    "custom_loop.checkpointer": ("Checkpointer",),
    "custom_loop.context": ("Context", "init"),
    "custom_loop.data_parallel": ("DataParallel",),
    "custom_loop.prepared": ("Prepared", "prepare"),
    "planner.scaling": ("ScalingPrediction", "predict_scaling"),
}


@pytest.mark.parametrize("module", OWN)
def test_the_examples_of_the_docstrings_run(module: str) -> None:
    found = importlib.import_module(f"paceline.{module}")
    for name in OWN[module]:
        assert getattr(pl, name) is getattr(found, name)
        assert ">>> " in getattr(found, name).__doc__
    assert doctest.testmod(found).failed == 0


def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "custom-loops.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(block, {})
    assert (tmp_path / "checkpoints/step-00000010/manifest.json").is_file()


def test_predictions_need_no_torch_and_importing_every_part_starts_no_cuda() -> None:
    code = (
        "import sys, json, paceline as pl\n"
        "found = pl.predict_scaling('resnet50', accelerator='h100', nodes=4, gpus_per_node=8)\n"
        "print(json.dumps([found.ranks, found.images_per_s, found.describe()]))\n"
        "assert 'torch' not in sys.modules\n"
        "for name in pl.__all__: getattr(pl, name)\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    ranks, speed, table = json.loads(done.stdout)
    assert ranks == 32
    assert speed > 32 * 1000
    assert "node_gbps" in table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"accelerator": "h101"}, "^accelerator = 'h101'"),
        ({"model": "resnet51"}, "^model = 'resnet51'"),
        ({"model": "timm:resnet50"}, "^model = 'timm:resnet50': .* torch"),
        ({"nodes": 0}, "^nodes = 0"),
        ({"batch_size": 0}, "^batch_size = 0"),
        ({"gpus_per_node": 0}, "^gpus_per_node"),
        ({"wires": ["fp8"]}, "^wires"),
        ({"algorithms": ["rign"]}, "did you mean 'ring'"),
        ({"cluster": "c.toml", "links": 2}, "leave out one"),
        ({"cluster": "nowhere.toml"}, "^cluster = 'nowhere.toml'"),
        ({"profile": "nowhere.toml"}, "^profile = 'nowhere.toml'"),
        ({"profile": "any.toml", "classes": 10}, "^classes = 10: is set by the profile"),
        ({"classes": 0}, "^classes = 0"),
        ({"image_size": 8}, "^image_size = 8"),
        ({"image_size": 1_000_000}, "^image_size = 1000000"),
        ({"input_images_per_s": float("nan")}, "^input_images_per_s = nan"),
    ],
)
def test_mistakes_name_the_argument(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pl.predict_scaling(**arguments)
