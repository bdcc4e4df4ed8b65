"""Settings: every wrong value fails with one line that names the field."""

import math
import subprocess
import sys

import pytest

from paceline.core.errors import ConfigError
from paceline.models.settings import MODEL_NAMES, ModelSettings


def test_defaults_are_valid_and_frozen():
    settings = ModelSettings()
    assert (settings.name, settings.num_classes, settings.stem) == ("resnet50", None, "auto")
    with pytest.raises(AttributeError):
        settings.name = "resnet18"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_known_name_is_accepted(name):
    assert ModelSettings(name=name).name == name


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError) as caught:
        ModelSettings(name="resnet51")
    assert str(caught.value).startswith("model.name = 'resnet51': ")
    assert "did you mean 'resnet50'?" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_classes": 0}, "model.num_classes"),
        ({"num_classes": -3}, "model.num_classes"),
        ({"stem": "smal"}, "model.stem"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"dropout": -0.1}, "model.dropout"),
        ({"dropout": math.nan}, "model.dropout"),
        ({"name": "alexnet", "stem": "small"}, "model.stem"),
        ({"name": "resnet_tiny", "stem": "imagenet"}, "model.stem"),
    ],
)
def test_bad_values_name_their_field(values, field):
    with pytest.raises(ConfigError) as caught:
        ModelSettings(**values)
    assert caught.value.field == field
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stem", "image_size", "expected"),
    [
        ("auto", 28, "small"),
        ("auto", 64, "small"),
        ("auto", 65, "imagenet"),
        ("small", 224, "small"),
        ("imagenet", 32, "imagenet"),
    ],
)
def test_stem_follows_the_image_size_unless_set(stem, image_size, expected):
    assert ModelSettings(stem=stem).stem_for(image_size) == expected


def test_room_and_settings_load_without_torch():
    code = (
        "import sys, paceline.models, paceline.models.settings\n"
        "paceline.models.ModelSettings()\n"
        "sys.exit('torch' in sys.modules)"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0
