"""The examples and the notebook run, each where its packages are."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_runs import is_launchers
from data_sets import write_shards
from paceline.data.sources import shards as images
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"own_model": "torch", "own_data": "torch", "fine_tuning": "torch", "timm_model": "timm"}
SLOW = ("fine_tuning",)  # two trainings on all embedded images


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    return env | {"PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_WAIT_POLICY": "PASSIVE"}


def _example(rank: int, name: str, folder: str) -> str:
    """Runs an example as a program, for one epoch, in a process that has imported torch already; one that
    is not slow with few images."""
    for launchers in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        del os.environ[launchers]
    os.chdir(folder)
    program, embedded = (EXAMPLES / f"{name}.py").read_text(), images.EMBEDDED
    if name not in SLOW:
        program = program.replace("1024", "128")
        images.EMBEDDED = write_shards(Path(folder) / "embedded", train=256)
        for shard in images.EMBEDDED.glob("*.tar"):
            shard.with_name(f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    copy = Path(folder) / f"{name}.py"
    copy.write_text(program)
    sys.argv = [copy.name, "1"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(copy), run_name="__main__")
    finally:
        images.EMBEDDED = embedded
    return out.getvalue()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NEEDS],
)
def test_examples_run(name: str, tmp_path: Path) -> None:
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    (printed,) = run_ranks(1, _example, name, str(tmp_path))
    assert "top-1" in printed or "Prediction" in printed


def run_notebook(name: str, folder: Path, head: str = "") -> str:
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    words = [sys.executable, "-c", "\n\n".join([head, *code])]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True,
                          timeout=250)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    run_notebook("quickstart.ipynb", tmp_path)


def test_the_planners_notebook_runs_without_torch(tmp_path: Path) -> None:
    said = run_notebook("planner.ipynb", tmp_path, "import sys\nsys.modules['torch'] = None")
    assert "images/s" in said
    assert "1,759 images fit" in said


def test_users_code_type_checks_and_its_mistakes_are_found(tmp_path: Path) -> None:
    """Against the public names, under mypy --strict; also names that do not exist, although they load on
    first use."""
    program, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    program.write_text(
        "import numpy as np\n"
        "import paceline as pl\n"
        "class Stop(pl.Callback):\n"
        "    def on_evaluation(self, run: pl.RunControl, event: pl.EvalEvent) -> None:\n"
        "        if event.top1 > 90:\n"
        "            run.stop('enough')\n"
        "class Album(pl.Source):\n"
        "    def __init__(self, labels: list[int]) -> None:\n"
        "        self.classes = ['cat', 'dog']\n"
        "        self.labels = labels\n"
        "        self.labels = np.array(labels, dtype=np.int32)\n"
        "        self.labels = [0, 1]\n"
        "    def read(self, i: int) -> bytes:\n"
        "        return b''\n"
        "label: int = int(Album([0, 1]).labels[0])\n"
        "result = pl.Trainer('resnet18', 'photos', epochs=3, callbacks=[Stop()]).fit()\n"
        "top1: float | None = result.top1\n"
        "labels: list[str] = [p.label for p in pl.Predictor.load(result.folder).predict(['a.jpg'])]\n"
    )
    packages = ("comm", "custom_loop", "data", "models", "optim", "precision", "train")
    wrong.write_text(
        "import paceline as pl\n"
        "pl.Trianer('resnet18')\n"
        "pl.Trainer('resnet18', epohs=3)\n"
        "pl.Trainer('resnet18', epochs='3')\n"
        + "".join(f"from paceline.{name} import Nothing as N{name}\n" for name in packages)
    )
    # In the project's directory, with its settings: so the cache that `make types` has left is valid.
    words = [sys.executable, "-m", "mypy", "--strict", str(program), str(wrong)]
    env = environment() | {"MYPYPATH": "src"}
    done = subprocess.run(words, cwd=EXAMPLES.parent, env=env, capture_output=True, text=True,
                          timeout=250)  # fmt: skip
    errors = [line.split(":") for line in done.stdout.splitlines() if ": error: " in line]
    assert {(Path(file).name, int(line)) for file, line, *_ in errors} == {
        (wrong.name, line) for line in range(2, 5 + len(packages))
    }, done.stdout
