from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.config import (
    DEFAULTS,
    SECTIONS,
    Job,
    RunConfig,
    load_config,
    parse_assignment,
    read_recipe,
    recipe_names,
    setting_names,
)
from paceline.core.errors import ConfigError
from paceline.optim.schedules import LrSchedule
from paceline.train.batch_sizes import batch_stages, requested_batch, resolve_batch_sizes
from paceline.train.components import Components
from paceline.train.resolve import refuse
from refusals import refused

ROOT = Path(__file__).parents[1]
TORCH_FREE = """
import sys
import paceline.comm, paceline.comm.settings, paceline.models, paceline.optim
paceline.optim.OptimSettings(), paceline.models.ModelSettings(), paceline.comm.SizeTable
assert not {"torch", "safetensors"} & set(sys.modules)
paceline.optim.LARS, paceline.comm.HybridAllReduce
assert "torch" in sys.modules and "triton" not in sys.modules
"""


def test_settings_load_without_torch() -> None:
    """And what needs it imports it by itself, but not Triton."""
    subprocess.run([sys.executable, "-c", TORCH_FREE], check=True, timeout=250)


def test_the_promised_recipes_are_shipped_and_valid() -> None:
    promised = {"quickstart", "cifar10-resnet18", "imagenet-resnet50", "imagenet-alexnet"}
    assert promised <= set(recipe_names())
    described = (ROOT / "docs" / "optimizers.md").read_text().partition("## Recipes")[2]
    for name in recipe_names():
        # A row may shorten a name to its end, as in `imagenet-resnet50-3k`, `-13k`.
        short = any(f"`{name[at:]}`" in described for at, sign in enumerate(name) if sign == "-")
        assert f"`{name}`" in described or short, name
        config = load_config(name, {})
        assert config.run.name == name
        assert config.run.global_batch_size is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", recipe_names())
def test_recipes_start_on_either_kind_of_device(name: str, device: str) -> None:
    refuse(load_config(name, {}), Job(processes=1, device=device), Components())


def test_batches_of_a_recipe_that_grow_fit_four_ranks() -> None:
    values = {"run.global_batch_size": 1024, "run.batch_size": 128}
    growth = {"optim.batch_schedule": "0:1024,30:2048,45:3584"}
    config = load_config("cifar10-resnet18", values | growth)
    sizes = resolve_batch_sizes(*requested_batch(config, 4))
    assert [batch for _, batch in batch_stages(config.optim, sizes)] == [2048, 3584]


def test_defaults_below_recipe_below_flags(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[optim]\nmomentum = 0.8\nweight_decay = 1e-3\n")
    config = load_config(str(recipe), {"optim.momentum": 0.7})
    assert config.optim.momentum == 0.7
    assert config.optim.weight_decay == 1e-3
    assert config.optim.warmup_epochs == RunConfig().optim.warmup_epochs
    assert config.run.name == "mine"


@pytest.mark.parametrize(
    ("text", "flags", "share"),
    [
        ("", {}, 0.2),
        ("[run]\nepochs = 2\n", {}, 0.2),  # nobody asked for the default's 5 epochs
        ("[optim]\nwarmup_epochs = 3\n[run]\nepochs = 15\n", {"run.epochs": 2}, 0.2),
        ("[optim]\nwarmup_epochs = 32\n[run]\nepochs = 77\n", {"run.epochs": 10}, 0.42),
        ("[optim]\nwarmup_epochs = 3\n[run]\nepochs = 2\n", {}, 1.0),
        ("[run]\nepochs = 2\n", {"optim.warmup_epochs": 5.0}, 1.0),
        ("[optim]\nwarmup_max_share = 0.1\n", {"optim.warmup_epochs": 5.0}, 0.1),
        ("", {"optim.warmup_max_share": 0.5}, 0.5),
    ],
)
def test_the_share_of_warmup_is_the_recipes_own_unless_warmup_is_asked_for(
    tmp_path: Path, text: str, flags: dict[str, float], share: float
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text)
    assert load_config(str(recipe), flags).optim.warmup_max_share == share


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_keep_their_warmup_at_their_own_length(name: str) -> None:
    config = load_config(name, {})
    for per_epoch in (3.0, 93.75, 400.364):
        total = math.ceil(config.run.epochs * per_epoch)
        schedule = LrSchedule(config.optim, 1.0, total, per_epoch)
        assert schedule.warmup_steps == config.optim.warmup_epochs * per_epoch
        assert schedule.describe_cut() == ""


def test_the_written_toml_reproduces_the_configuration() -> None:
    config = load_config("quickstart", {"run.target_top1": 80.0, "data.mean": [0.25]})
    assert RunConfig.from_tables(tomllib.loads(config.to_toml())) == config


def test_the_written_toml_has_what_is_in_use_and_the_version_of_the_defaults() -> None:
    values = {"optim.name": "lars", "optim.lars.clip": True, "optim.muon.steps": "fixed"}
    config = RunConfig().with_values(values)
    written = tomllib.loads(config.to_toml())
    assert written.pop("defaults") == DEFAULTS
    assert written["optim"]["lars"] == {"trust_coefficient": 0.001, "clip": True}
    assert "muon" not in written["optim"]
    # A checkpoint has all values, a file without a version means today's defaults.
    assert config.to_tables()["optim"]["muon"]["steps"] == "fixed"
    assert RunConfig.from_tables(written).in_use() == config.in_use() == written
    with refused("defaults"):
        RunConfig.from_tables({"defaults": DEFAULTS + 1, **written})


def test_an_unknown_recipe_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        read_recipe("quikstart")
    with pytest.raises(ConfigError, match="no such file"):
        read_recipe("nowhere/mine.toml")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("run.seed=3", ("run.seed", 3)),
        ("data.mean=[0.5, 0.5]", ("data.mean", [0.5, 0.5])),
        ("data.dir=/a=b", ("data.dir", "/a=b")),
        ("data.dir=7", ("data.dir", "7")),
        ("optim.lr=.1", ("optim.lr", 0.1)),
        ("run.epochs=ten", ("run.epochs", "ten")),
    ],
)
def test_assignments_are_toml_or_bare_words(text: str, parsed: tuple[str, object]) -> None:
    assert parse_assignment(text) == parsed


@pytest.mark.parametrize("text", ["run.seed", "=3", "seed"])
def test_an_assignment_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="section.key=value"):
        parse_assignment(text)


def test_a_key_without_a_section_suggests_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'run.seed'"):
        load_config("quickstart", {"seed": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.epochs", 0),
        ("run.global_batch_size", 0),
        ("run.seed", -1),
        ("run.target_top1", 101.0),
        ("run.device", "gpu"),
        ("run.threads", 99_999_999_999),
        ("optim.lr", float("nan")),
        ("optim.lr", 10**400),
        ("comm.timeout_s", 0.0),
        ("comm.backend", "mpi"),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_config("quickstart", {name: value})


def test_every_setting_that_the_source_names_exists() -> None:
    """An error that names a setting which cannot be set leads nowhere."""
    known = set(setting_names())
    known |= {name.rpartition(".")[0] for name in known}
    # Files of the run folder, of torch.save and of Hugging Face.
    known |= {"run.lock", "data.pkl", "model.safetensors"}
    named = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+(?![\w(/.:\[])")
    unknown = []
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = set(named.findall(node.value)) - known
                unknown += [f"{file.name}:{node.lineno}: {name}" for name in found]
    assert not unknown


def test_settings_of_a_recipe_follow_the_image() -> None:
    small = load_config("imagenet-resnet50", {"data.image_size": 112}).data
    assert (small.image_size, small.eval_resize) == (112, 128)
    assert (
        load_config(
            "imagenet-resnet50", {"data.image_size": 112, "data.eval_resize": 0}
        ).data.eval_resize
        == 0
    )
    assert load_config("quickstart", {"data.image_size": 64}).data.eval_resize == 0
    grey = load_config("imagenet-resnet50", {"data.channels": 1}).data
    assert (len(grey.mean), len(grey.std)) == (1, 1)
    assert load_config("quickstart", {"data.channels": 3}).data.mean == (0.286,)
    assert RunConfig().with_values({"data.image_size": 32}).data.eval_resize == 37
    for name in recipe_names():  # as they were before this rule
        data = load_config(name, {}).data
        assert data.eval_resize == (256 if data.image_size == 224 else 0)
