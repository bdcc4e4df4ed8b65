"""Code that a file names runs with trust only, whichever command or class reads the file.

What can name code and what reads files is generated from the source and compared with the lists below:
a new entry fails until it is listed here, and checked if it can name code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import typer
from torch import nn

import paceline as pl
from cli_runs import Call
from paceline.cli.app import app
from paceline.config import RunConfig, load_config, setting_names, unflatten
from paceline.config.trust import CODE_SETTINGS, LOSSES_OF_TORCH, check_trust
from paceline.core.errors import ConfigError
from paceline.core.imports import import_object
from paceline.models import settings as model_settings
from paceline.models.settings import register_model
from paceline.optim.build import create_optimizer
from paceline.optim.settings import OptimSettings
from paceline.train.checkpoint import Checkpoint, find_checkpoint
from small_runs import SMALL, run_small

SOURCE = Path(__file__).parents[2] / "src/paceline"
# Evaluates a text, by way of a package that torch imports.
WILD = "torch.utils._sympy.functions:sympy.Wild"
ARGUMENTS = "{exclude = [\"__import__('os').system('touch ran')\"]}"
ATTACK = f"[optim]\nname = '{WILD}'\narguments = '''{ARGUMENTS}'''\nlr = 0.1\n"
OWN_NET = """
from paceline.models import ModelSettings, create_model
open("ran", "w").close()
def make(num_classes, in_channels):
    return create_model(ModelSettings("resnet_tiny"), num_classes=num_classes, in_channels=in_channels)
"""
PHOTO = torch.zeros(12, 12, 1, dtype=torch.uint8).numpy()

# Settings that accept any text, and why none of them makes code run.
FREE_TEXT = {
    "run.trackers": "a name in the registry of trackers, refused when the run opens",
    "run.name": "shown", "run.output": "a folder to write", "data.cache_dir": "a folder to write",
    "run.resume": "a file, read as plain tensors", "run.pretrained": "a file, read as plain tensors",
    "data.dir": "images", "comm.plan": "a TOML file of numbers and known names",
    "comm.hybrid.sizes": "a file of numbers and known names",
    **{f"run.rehearsal.{name}": "a TOML file of numbers" for name in ("gpu", "profile", "cluster")},
    "model.freeze": "patterns of names",
}  # fmt: skip
# Calls that run code of a text or a file, and the modules that have them.
RUNNING = (
    r"\w*Unpickler|pickle\.loads?|(importlib\.)?import_module|import_object|__import__|exec|eval"
    r"|runpy\.\w+|\S*add_safe_globals|\S*spec_from_file_location|\S*load_library|marshal\.\w+"
)
RUNS_CODE = {
    "cli/app.py importlib.import_module",
    "core/extensions.py importlib.import_module",  # our own
    "core/__init__.py importlib.import_module",  # names of this package
    "core/imports.py importlib.import_module",
    "models/factories.py importlib.import_module",  # timm and torchvision
    "models/factories.py import_object",
    "optim/build.py importlib.import_module",  # timm
    "recipes/weights.py importlib.import_module",  # Hugging Face's hub, if asked for
    "optim/build.py import_object",
    "train/loss.py import_object",
}
# Calls that make a configuration of a file, or read TOML; `run_config` checks what its names name.
READING = r"load_config|stored_config|read_recipe|parse_toml|\w+\.from_tables"
READS_CONFIG = {
    "cli/train.py load_config", "cli/tune.py load_config", "config/run_config.py RunConfig.from_tables",
    "config/recipe.py parse_toml", "config/run_config.py load_config",
    "config/run_config.py parse_toml",
    "config/run_config.py read_recipe",
    "core/settings.py parse_toml",  # the text of one setting
    "plan/plan_file.py parse_toml", "planner/accelerators.py parse_toml",
    # Numbers and names of a plan, of which none names code.
    "plan/plan_file.py cls.from_tables", "comm/probe_cache.py PlanFile.from_tables",
    "comm/probe_cache.py parse_toml",
    "report/run_files.py parse_toml", "train/run_folder.py parse_toml",  # shown, compared
    "train/evaluate.py stored_config", "train/export.py stored_config",
    "train/inference.py stored_config", "trainer.py load_config",
}  # fmt: skip
# Those that take a file for trusted: the weights of a checkpoint are exported without its model.
TRUSTS_ALWAYS = ["train/export.py stored_config"]
RECIPE_COMMANDS = {
    "train": [], "train --dry-run": ["--dry-run"], "train --nproc-per-node": ["--nproc-per-node", "2"],
    "rehearse": ["--nodes", "2"], "lr-find": [], "tune": ["--ranks", "1"],
}  # fmt: skip
CHECKPOINT_COMMANDS = {"eval": [], "predict": ["photo.png"], "export": ["net.onnx"]}
OTHER_COMMANDS = {
    "recipes", "models", "report", "compare", "watch", "doctor", "plan", "profile", "pack", "inspect",
    "bench allreduce", "bench input", "bench step",
}  # fmt: skip
# Parameters of the public API that are paths; those of True are files that name code.
PATHS = {
    "Trainer.__init__ recipe": True, "Trainer.__init__ output": True, "Predictor.load run": True,
    "Trainer.__init__ plan": False, "Trainer.__init__ pretrained": False,
    "Trainer.__init__ resume": False, "Trainer.export out": False, "Predictor.export out": False,
    "Predictor.__init__ path": False, "Result.__init__ folder": False,
    "Checkpointer.__init__ folder": False, "DataParallel.__init__ plan": False,
    "SizeTable.read path": False, "SizeTable.write path": False,
    "predict_scaling profile": False, "predict_scaling cluster": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module that leaves a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_net.py").write_text(OWN_NET)
    (tmp_path / "mine.toml").write_text(ATTACK)
    yield tmp_path
    sys.modules.pop("own_net", None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("trained") / "run", run__epochs=1).folder


@pytest.fixture
def hostile(trained: Path, place: Path) -> Path:
    """A run folder whose checkpoint names a module for its model."""
    folder = Path(shutil.copytree(trained, place / "run"))
    path = find_checkpoint(folder)
    found = Checkpoint.read(path)
    model = {**found.config["model"], "name": "own_net:make"}
    replace(found, config={**found.config, "model": model}).write(path)
    return folder


def assert_refused(call: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert (caught.value.field, Path("ran").exists()) == (field, False)
    assert "--trust" in caught.value.remedy


def loads(
    values: Mapping[str, Any], named: Mapping[str, Any] | None = None, trust: bool = False
) -> RunConfig:
    """The configuration of a file with these values, and of those that the user names."""
    Path("file.toml").write_text(tomli_w.dumps(unflatten({"optim.lr": 0.1, **values})))
    return load_config("file.toml", named or {}, trust=trust)


def test_the_attack_would_work() -> None:
    """Otherwise the tests below could not fail."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    with pytest.raises(ConfigError):
        create_optimizer(OptimSettings(WILD, arguments=ARGUMENTS, lr=0.1), groups, 0.1)
    assert Path("ran").exists()


@pytest.mark.parametrize(("command", "rank"), [*((c, "") for c in RECIPE_COMMANDS), ("train", "1")])
def test_no_command_runs_code_of_a_recipe(
    call: Call, monkeypatch: pytest.MonkeyPatch, command: str, rank: str
) -> None:
    if rank:  # a rank, which a launcher has started with the same command
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    line = call(command.split()[0], "mine.toml", *RECIPE_COMMANDS[command]).error_line()
    assert "optim.name" in line
    assert "--trust" in line
    assert not Path("ran").exists()


@pytest.mark.parametrize("command", CHECKPOINT_COMMANDS)
def test_no_command_runs_code_of_a_checkpoint(call: Call, hostile: Path, command: str) -> None:
    line = call(command, str(hostile), *CHECKPOINT_COMMANDS[command]).error_line()
    assert "model.name" in line
    assert "--trust" in line
    assert not Path("ran").exists()


def test_weights_are_exported_without_running_code(call: Call, hostile: Path) -> None:
    done = call("export", str(hostile), "net.safetensors")
    assert done.code == 0, done.err
    assert not Path("ran").exists()


def test_no_class_runs_code_of_a_file(hostile: Path) -> None:
    assert_refused(lambda: pl.Trainer(recipe="mine.toml"), "optim.name")
    assert_refused(lambda: pl.Trainer(recipe=Path("mine.toml"), model="resnet_tiny"), "optim.name")
    assert_refused(lambda: pl.Predictor.load(hostile), "model.name")
    shown = {"output": hostile, "settings": SMALL}
    for use in (
        lambda: pl.Trainer(**shown).evaluate(),
        lambda: pl.Trainer(**shown).predict([PHOTO]),
        lambda: pl.Trainer(**shown).export("net.pt2"),
    ):
        assert_refused(use, "model.name")
    assert pl.Trainer(recipe="mine.toml", trust=True).config.optim.name == WILD


def test_what_a_program_names_needs_no_trust(hostile: Path) -> None:
    named = pl.Trainer("own_net:make", output=hostile, settings=SMALL | {"model.name": "alexnet"})
    assert len(named.predict([PHOTO])) == 1
    assert Path("ran").exists()


def test_a_trusted_run_is_used(hostile: Path) -> None:
    assert pl.Predictor.load(hostile, trust=True).config.model.name == "own_net:make"
    assert pl.Trainer(output=hostile, settings=SMALL, trust=True).predict([PHOTO])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model.name", "own_net:make"), ("model.name", "timm:hf-hub:a/b"), ("model.name", "timm:a/b"),
        ("model.name", "timm:local-dir:x"), ("optim.name", "torch.optim:lr_scheduler.StepLR"),
        ("optim.name", "torch.optim:_functional"), ("optim.name", "torch.optim.adam:Adam"),
        ("optim.name", "own_net:make"), ("run.loss", "own_net:make"),
        ("run.loss", "torch.nn.functional:importlib.import_module"),
        ("run.loss", "torch.nn.functional:boolean_dispatch"), ("run.loss", "torch:load"),
        ("run.loss", "torch.nn:functional.cross_entropy"), ("run.loss", "torch.nn:Linear"),
        ("run.loss", "builtins:exec"), ("run.loss", "python.os:system"),
        ("model.arguments", '{checkpoint_path = "a.pth"}'), ("model.arguments", "{pretrained = true}"),
        ("model.arguments", '{weights = "DEFAULT"}'), ("model.arguments", '{drop_rate = "a"}'),
        ("model.arguments", '{pretrained_cfg = {file = "a"}}'),
    ],
)  # fmt: skip
def test_names_that_need_trust(setting: str, value: str) -> None:
    values = {"model.name": "timm:resnet18", setting: value}
    assert_refused(lambda: loads(values), setting)
    if setting == "model.arguments":  # also for a model that the user names
        assert_refused(lambda: loads(values, {"model.name": "torchvision:resnet18"}), setting)
    assert loads(values, trust=True).flat()[setting] == value
    assert loads(values, {setting: value}).flat()[setting] == value  # named by the user


def test_names_that_need_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_settings, "_registered", {})
    register_model("mine", nn.Identity)
    for model in (
        "resnet18",
        "timm:convnext_tiny.fb_in22k",
        "torchvision:vit_b_16",
        "mine",
        "python:Net",
    ):
        assert loads({"model.name": model}).model.name == model
    for optimizer in ("lamb", "torch.optim:RAdam", "python:make"):
        assert loads({"optim.name": optimizer}).optim.name == optimizer
    for loss in ("bce", "torch.nn:MSELoss", "torch.nn.functional:mse_loss", "python:focal"):
        assert loads({"run.loss": loss}).run.loss == loss
    assert loads({"optim.name": "torch.optim:RAdam", "optim.arguments": "{betas = [0.9, 0.99]}"})
    arguments = "{drop_rate = 0.1, aux_logits = false}"
    assert loads({"model.name": "timm:resnet18", "model.arguments": arguments})


def test_arguments_of_a_file_do_not_reach_a_class_that_the_user_names() -> None:
    values = {"optim.name": "torch.optim:RAdam", "optim.arguments": '{path = "a"}'}
    named = {"optim.name": "own_net:make", "optim.lr": 0.1}
    assert_refused(lambda: loads(values, named), "optim.arguments")


def test_only_optimizers_of_torch_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def evil(*_: object, **__: object) -> None:
        Path("ran").touch()

    monkeypatch.setattr(torch.optim, "Evil", evil, raising=False)
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    with pytest.raises(ConfigError):
        create_optimizer(OptimSettings("torch.optim:Evil", lr=0.1), groups, 0.1)
    assert not Path("ran").exists()


def test_losses_of_torch_are_losses() -> None:
    for module, names in LOSSES_OF_TORCH.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            if module == "torch.nn":
                assert found.__module__ == "torch.nn.modules.loss", name
            else:
                assert list(inspect.signature(found).parameters)[1] == "target", name


def test_names_of_imported_packages_add_no_directory() -> None:
    """Torch's own later imports would find modules of a foreign folder."""
    before = list(sys.path)
    import_object("run.loss", "torch.nn:MSELoss")
    assert sys.path == before


# What the source contains.


def calls(functions: str) -> Iterator[tuple[str, ast.Call]]:
    """`module function` of every call in the package of one of these functions, or with one of them."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if not re.search(rf"(?<![.\w])({functions})\b", text):
            continue  # parsing all modules takes seconds
        for node in ast.walk(ast.parse(text)):
            for called in (node.func, *node.args) if isinstance(node, ast.Call) else ():
                if re.fullmatch(functions, name := ast.unparse(called)):
                    yield f"{path.relative_to(SOURCE).as_posix()} {name}", node


def keywords(node: ast.Call) -> dict[str | None, str]:
    return {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_all_calls_that_run_code_are_listed() -> None:
    assert {name for name, _ in calls(RUNNING)} == RUNS_CODE
    loads = [keywords(node) for _, node in calls(r"(torch|np|numpy)\.load")]
    assert loads
    assert all(words.get("weights_only") == "True" for words in loads)


def test_all_calls_that_read_configurations_are_listed() -> None:
    found = list(calls(READING))
    assert {name for name, _ in found} == READS_CONFIG
    assert [n for n, node in found if keywords(node).get("trust") == "True"] == TRUSTS_ALWAYS


def test_all_settings_that_can_name_code_are_checked() -> None:
    """A text that accepts a name of a module, or a table of arguments, can."""
    base = {
        "optim.lr": 0.1, "model.name": "timm:x", "optim.name": "torch.optim:RAdam",
    }  # fmt: skip
    accepted = set()
    for name in setting_names():
        for text in ("own_net:make", '{key = "value"}'):
            for value in (text, [text]):
                with contextlib.suppress(ConfigError):
                    RunConfig().with_values(base | {name: value})
                    accepted.add(name)
    assert accepted == CODE_SETTINGS.keys() | FREE_TEXT.keys()


def test_all_commands_are_listed() -> None:
    def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
        for name in group.commands:
            command = group.get_command(None, name)
            if hasattr(command, "commands"):
                yield from commands(command, f"{prefix}{name} ")
            else:
                yield prefix + name, any(p.name == "trust" for p in command.params)

    found = dict(commands(typer.main.get_command(app)))
    checked = {name.split()[0] for name in RECIPE_COMMANDS} | CHECKPOINT_COMMANDS.keys()
    assert {name for name, has_trust in found.items() if has_trust} == checked
    assert found.keys() - checked == OTHER_COMMANDS


def test_all_paths_of_the_public_api_are_listed() -> None:
    found = set()
    for name in pl.__all__:
        public = getattr(pl, name)
        functions = {name: public} if inspect.isfunction(public) else {}
        if inspect.isclass(public):
            own = [k for k in vars(public) if k == "__init__" or not k.startswith("_")]
            functions = {f"{name}.{k}": getattr(public, k) for k in own}
        for where, function in functions.items():
            if callable(function):
                parameters = inspect.signature(function).parameters.values()
                found |= {f"{where} {p.name}" for p in parameters if "Path" in str(p.annotation)}
    assert found == PATHS.keys()
    for where in (name.split()[0] for name, names_code in PATHS.items() if names_code):
        kind, _, method = where.partition(".")
        assert "trust" in inspect.signature(getattr(getattr(pl, kind), method)).parameters, where


def test_an_unlisted_origin_is_not_exempt() -> None:
    """The rule does not look at other files, or at the name of this one."""
    values = RunConfig().with_values({"run.loss": "own_net:make"}).flat()
    for origin in ("quickstart", "runs/x/config.toml", Path("x.pt")):
        assert_refused(lambda origin=origin: check_trust(values, {}, origin), "run.loss")  # type: ignore[misc]
