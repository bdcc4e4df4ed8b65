"""The commands and programs of README and docs run as they are written, page by page: `make docs-test`.

Commands that need data or packages that are not here (`DIR`, ImageNet recipes, timm) run with `--dry-run`
on a few made-up photos, or are left out where they have no such flag. Programs of benchmarks/ run as they
are, unless they start ranks; programs with an emulated cluster run where it can be created.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.cluster import why_unavailable
from cli_runs import is_launchers
from paceline.models import ModelSettings, create_model
from paceline.plan.plan_file import PlanFile
from tools.test_docs import COMMANDS, PAGES, ROOT, blocks, shell_lines

MY_NET = (
    "from torch import nn\n\n"
    "def make(num_classes, in_channels=3, width=8):\n"
    "    return nn.Sequential(nn.Conv2d(in_channels, width, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),\n"
    "                         nn.Flatten(), nn.Linear(width, num_classes))\n"
)
# Without a run of the page itself.
NEEDS = {"RUN": "run1", "runs/quickstart-001": "run1"}
# Stands for `torchrun … tune`: two ranks of this machine, few sizes, a small model.
TUNE = (
    "tune --nproc-per-node 2 --model resnet_tiny --image-size 32 --classes 10 -b 4 --algorithms ring "
    "--max-bytes 16KiB --iterations 3 --limit-s 5 --accept-noise -o"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(40):
            pixels = chance.integers(0, 256, (72, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.jpg")
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")
    (tmp_path / "my_net.py").write_text(MY_NET)
    (tmp_path / "rank.py").write_text("import os; print(os.environ['RANK'])\n")
    quickstart = (ROOT / "src/paceline/recipes/quickstart.toml").read_text()
    (tmp_path / "my.toml").write_text(quickstart.replace("epochs = 15", "epochs = 1"))
    return tmp_path


ENVIRONMENT = {name: value for name, value in os.environ.items() if not is_launchers(name)}
ENVIRONMENT |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def run(home: Path, words: list[str]) -> None:
    done = subprocess.run(
        words, cwd=home, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def serve(home: Path, words: list[str]) -> None:
    """A command that runs until it is stopped: its page is fetched once."""
    with subprocess.Popen(
        words, cwd=home, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            address = re.search(r"http://\S+", line)
            assert address, f"{shlex.join(words)}\n{line}"
            with urlopen(address[0], timeout=60) as page:
                assert page.status == 200
        finally:
            server.terminate()


def as_two_nodes(path: Path) -> None:
    """The links between two ranks of this machine stand for those between nodes."""
    file = PlanFile.read(path)
    assert file.probed
    probed = replace(file.probed, ranks_per_node=(1, 1), intra=None, inter=file.probed.intra)
    replace(file, probed=probed, cluster=probed.facts).write(path)


def runnable(line: list[str], home: Path) -> list[str] | None:
    """The command with what is made up in place of placeholders; None where it cannot run here."""
    words = [word if (home / word).exists() else NEEDS.get(word, word) for word in line]
    text = " ".join(words)
    if "timm:" in text and find_spec("timm") is None:
        return None
    if (
        words[0] in ("report", "predict", "export")
        and "run1" in words
        and not (home / "run1").exists()
    ):
        run(home, [sys.executable, "-m", "paceline", "train", "--epochs", "1", "--output", "run1"])
    if (
        "--pretrained" in words
        and not (weights := home / words[words.index("--pretrained") + 1]).exists()
    ):
        model = create_model(ModelSettings("resnet18"), num_classes=1000)
        torch.save(model.state_dict(), weights)
    if "--cluster" in words and not (home / words[words.index("--cluster") + 1]).exists():
        measured = words[words.index("--cluster") + 1]
        run(home, [sys.executable, "-m", "paceline", *TUNE.split(), measured])
        if "--nodes" in words:
            as_two_nodes(home / measured)
    if words[0] == "rehearse" and ("DIR" in words or "--profile" in words):
        return None  # tests/rehearsal/test_runs.py
    if "DIR" in words and "optim.scaling=auto" in words:
        return (
            None  # the rule refuses a batch of a few photos; the page has one on the quickstart's
        )
    if "DIR" in words or "imagenet" in text:
        words = ["photos" if word == "DIR" else word for word in words]
        words += ["--val-split", "0.2", "-b", "8", "--global-batch-size", "8", "--image-size", "64"]
        # A plan is for one model on one cluster, and is checked at the start of a run.
        if "--plan" in words:
            at = words.index("--plan")
            del words[at : at + 2]
        return [*words, "--dry-run"]
    if words[0] == "tune":
        words.append("--accept-noise")  # of what else this host does
    return words


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a hang; a quickstart takes minutes on a busy host
@pytest.mark.parametrize("name", sorted({page for page, _ in COMMANDS}))
def test_commands_of_a_page(name: str, home: Path) -> None:
    for page, line in COMMANDS:
        words = runnable(line, home) if page == name else None
        if words is not None:
            start = serve if words[0] == "watch" else run
            start(home, [sys.executable, "-m", "paceline", *words])
    for line in shell_lines((ROOT / name).read_text()):
        if line.startswith("torchrun ") and " DIR" not in line:
            launched = shlex.split(line, comments=True)[1:]
            run(home, [sys.executable, "-m", "torch.distributed.run", *launched])
        elif line.startswith("python -m benchmarks.") and " -- " not in line:
            run(home, [sys.executable, *shlex.split(line, comments=True)[1:]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_programs_of_a_page(page: Path, home: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        if "net.onnx" in block:
            flags = ["--epochs", "1", "--output", "run1"]
            for words in (["train", *flags], ["export", "run1", "net.onnx"]):
                run(home, [sys.executable, "-m", "paceline", *words])
        if "EmulatedCluster" not in block or not why_unavailable():
            run(home, [sys.executable, "-c", block])
