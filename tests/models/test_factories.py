"""Models that are not part of Paceline: names, arguments of factories, errors of one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cli.listings import list_models
from paceline.core.errors import ConfigError
from paceline.models import (
    ModelSettings,
    check_model_name,
    create_model,
    register_model,
)
from paceline.models import settings as model_settings

TIMM = """
from torch import nn

class Sized(nn.Linear):
    pass

def list_models(pattern="*"):
    import fnmatch
    return [n for n in ("convnext_atto", "vit_tiny") if fnmatch.fnmatch(n, pattern)]

def create_model(name, pretrained=False, num_classes=1000, in_chans=3, **more):
    if name == "vit_tiny":
        net = nn.Linear(more.pop("img_size"), num_classes)
    elif "img_size" in more:
        nn.Linear(9, 9)  # draws before it fails
        raise TypeError("ConvNeXt.__init__() got an unexpected keyword argument 'img_size'")
    else:
        net = nn.Linear(in_chans, num_classes)
    net.more = {"pretrained": pretrained, **more}
    return net
"""
TORCHVISION = """
from torch import nn

def list_models(include="*"):
    return ["vgg11_bn", "vit_b_16"]

def get_model(name, weights="default", num_classes=1000, **more):
    if name == "vgg11_bn" and more:
        raise TypeError(f"VGG.__init__() got an unexpected keyword argument '{next(iter(more))}'")
    net = nn.Linear(3, num_classes)
    net.more = {"weights": weights, **more}
    return net
"""
MY_NETS = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, num_classes, width=3):
        super().__init__(width, num_classes)

class Nested:
    @staticmethod
    def make(**everything):
        net = Net(everything["num_classes"])
        net.more = everything
        return net

def timm_like(num_classes, in_chans, img_size):
    return nn.Linear(in_chans * img_size, num_classes)

def fails(num_classes):
    raise LookupError("no such width\\nand more")

def returns_nothing():
    pass

def on_meta(num_classes):
    return nn.Linear(3, num_classes, device="meta")

def lazy(num_classes):
    return nn.LazyLinear(num_classes)

def whole_numbers():
    import torch
    net = nn.Linear(1, 1)
    net.number = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    return net

def frozen(num_classes):
    return nn.Linear(3, num_classes).requires_grad_(False)

ready = nn.Linear(1, 1)
number = 3
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with stubs of timm and torchvision, and modules of a user, as the current one."""
    for name, text in (("timm", TIMM), ("torchvision", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "models.py").write_text("" if name == "timm" else TORCHVISION)
    (tmp_path / "my_nets.py").write_text(MY_NETS)
    (tmp_path / "broken.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "wrong.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    # Installed packages lie on Python's path; a user's modules need not.
    (tmp_path / "site").mkdir()
    for name in ("timm", "torchvision"):
        (tmp_path / name).rename(tmp_path / "site" / name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("timm", "torchvision", "my_nets", "broken", "my_package"):
            del sys.modules[name]


def create(name: str, **settings: Any) -> Any:
    return create_model(
        ModelSettings(name=name, **settings), num_classes=7, in_channels=2, image_size=5
    )


def refused(name: str, field: str = "model.name", **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        create(name, **settings)
    assert caught.value.field == field
    assert caught.value.remedy
    return str(caught.value)


def test_factories_get_what_they_take(packages: Path) -> None:
    net = create("my_nets:Net")
    assert tuple(net.weight.shape) == (7, 3)
    assert str(packages) in sys.path, "the current directory is importable"
    assert create("my_nets:Net", arguments="{width = 4}").in_features == 4
    assert create("my_nets:timm_like").in_features == 2 * 5
    everything = {"num_classes": 7, "in_channels": 2, "image_size": 5}
    assert create("my_nets:Nested.make").more == everything
    assert create("my_nets:Nested.make", arguments="{num_classes = 3}").out_features == 3


def test_timm_and_torchvision(packages: Path) -> None:
    """The size is passed if the model accepts it; the failed call does not change random numbers."""
    torch.manual_seed(1)
    plain = nn.Linear(2, 7)
    torch.manual_seed(1)
    net = create("timm:convnext_atto.d2_in1k", arguments="{drop_rate = 0.1}")
    assert torch.equal(net.weight, plain.weight)
    assert net.more == {"pretrained": False, "drop_rate": 0.1}
    assert create("timm:vit_tiny").in_features == 5
    settings = ModelSettings(name="torchvision:vgg11_bn")
    assert create_model(settings, num_classes=7).more == {"weights": None}  # type: ignore[comparison-overlap]
    settings = ModelSettings(name="torchvision:vit_b_16")
    made = create_model(settings, num_classes=7, image_size=64).more
    assert made == {"weights": None, "image_size": 64}  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:convnext_ato", "did you mean 'convnext_atto'?"),
        ("timm:xyz", "paceline models 'timm:*'"),
        ("torchvision:vgg11", "did you mean 'vgg11_bn'?"),
        ("torchvision:vgg11_bn", "take 3 channels, not 2"),
        ("my_nets:make", "my_nets has no attribute make"),
        ("my_nets:Nested.build", "Nested has no attribute build"),
        ("my_net:make", "no module 'my_net' in"),
        ("broken:make", "ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("wrong:make", "SyntaxError"),
        ("my_nets:ready", "name a function that returns the model"),
        ("my_nets:number", "is a int"),
        ("my_nets:fails", "LookupError: no such width; "),
        ("my_nets:returns_nothing", "returns a NoneType"),
        ("my_nets:on_meta", "weight is on the device meta"),
        ("my_nets:lazy", "weight has no shape yet"),
        ("my_nets:whole_numbers", "the parameter number is int64"),
        ("my_nets:frozen", "all of its parameters are frozen"),
    ],
)
def test_what_cannot_be_created_is_one_line(packages: Path, name: str, words: str) -> None:
    line = refused(name)
    assert words in line
    assert "\n" not in line


def test_packages_that_are_missing_and_arguments_that_do_not_exist(packages: Path) -> None:
    (packages / "site/timm").rename(packages / "site/gone")
    assert "pip install timm" in refused("timm:convnext_atto")
    line = refused("my_nets:Net", "model.arguments", arguments="{with = 3}")
    assert "did you mean 'width'?" in line
    refused("my_nets:Net", "model.arguments", arguments="{with = }")
    refused("my_nets:Net", "model.arguments", arguments="3")
    refused("resnet18", "model.arguments", arguments="{width = 4}")


@pytest.mark.parametrize(
    "name", ["resnet51", "timm:", ":make", "my net:make", "a:b:c", "a-b:c", ""]
)
def test_names_of_no_form(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model_name(name)
    assert caught.value.field == "model.name"
    assert "timm:NAME" in caught.value.remedy


def test_registered_names(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_settings, "_registered", {})
    register_model("my_linear", lambda num_classes: nn.Linear(3, num_classes))
    assert create("my_linear").out_features == 7
    for taken in ("resnet18", "my:net", "my net"):
        with pytest.raises(ConfigError):
            register_model(taken, nn.Identity)


def test_freezing(packages: Path) -> None:
    settings = ModelSettings(name="resnet18", freeze=("conv1.*", "bn1", "layer1.*"))
    net = create_model(settings, num_classes=4, image_size=32)
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert {name.partition(".")[0] for name in frozen} == {"conv1", "bn1", "layer1"}
    assert "layer1.1.bn2.bias" in frozen
    modes = {n: m.training for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {n for n, training in modes.items() if not training} == {
        n for n in modes if n.startswith(("bn1", "layer1"))
    }
    for pattern, words in (("layer11.*", "did you mean"), ("zz*", "named_parameters()")):
        assert words in refused("resnet18", "model.freeze", freeze=(pattern,))
    assert "no parameter to train" in refused("resnet18", "model.freeze", freeze=("*",))


def test_the_command_lists_models(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models(None, as_json=False)
    assert "25,557,032" in capsys.readouterr().out
    list_models("timm:conv*", as_json=False)
    assert capsys.readouterr().out == "timm:convnext_atto\n"
    list_models("alexnet*", as_json=True)
    assert json.loads(capsys.readouterr().out)["own"]["alexnet"] == 61_100_840
    with pytest.raises(ConfigError, match="did you mean"):
        list_models("resnt18", as_json=False)
