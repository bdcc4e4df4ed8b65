"""Settings of the data, the exports of the package, and the cost of importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline.data
from paceline.core.errors import ConfigError
from paceline.data import DataSettings
from refusals import refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "tfrecord"),
        ("augment", "pad_corp"),
        ("interpolation", "cubic"),
        ("image_size", 0),
        ("channels", 2),
        ("crop_padding", -1),
        ("crop_scale", (0.0, 1.0)),
        ("crop_scale", (0.5, 1.5)),
        ("crop_scale", (0.5,)),
        ("eval_resize", 200),
        ("eval_resize", 449),
        ("mean", (0.5, 0.5)),
        ("val_split", 1.0),
        ("val_split", -0.1),
        ("std", (0.0,)),
        ("std", (0.2, 0.2, float("nan"))),
        ("workers", -1),
        ("resident", "yes"),
        ("decoder", "libjpeg"),
        ("max_corrupt_share", 1.0),
        ("synthetic_samples", 0),
        ("synthetic_classes", 0),
    ],
)
def test_each_wrong_value_is_named(field: str, value: object) -> None:
    with refused(f"data.{field}") as caught:
        DataSettings(**{field: value})
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_statistics_follow_the_channels() -> None:
    with pytest.raises(ConfigError, match=r"data.mean.*has 3 values for data.channels = 1"):
        DataSettings(channels=1, mean=(0.5, 0.5, 0.5))
    assert DataSettings(channels=3, mean=(0.5,), std=(0.5,)).mean == (0.5,)
    assert (len(DataSettings().mean), len(DataSettings(channels=1).std)) == (3, 1)


def test_the_validation_resize_follows_the_image_size() -> None:
    assert (DataSettings().eval_resize, DataSettings(image_size=64).eval_resize) == (256, 73)
    with pytest.raises(ConfigError, match=r"data.eval_resize = 256.*set data.eval_resize = 73"):
        DataSettings(image_size=64, eval_resize=256)


def test_padding_must_leave_some_image() -> None:
    with pytest.raises(ConfigError, match=r"data.crop_padding = 8"):
        DataSettings(image_size=8, eval_resize=0, augment="pad_crop", crop_padding=8)


@pytest.mark.parametrize("source", ["embedded", "synthetic"])
def test_a_directory_that_would_not_be_read_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.dir"):
        DataSettings(source=source, dir="somewhere")


@pytest.mark.parametrize("source", ["shards", "folder", "cifar10"])
def test_a_source_in_a_directory_needs_one(source: str) -> None:
    with pytest.raises(ConfigError, match="needs a directory"):
        DataSettings(source=source)


def test_every_public_name_is_there() -> None:
    for name in paceline.data.__all__:
        assert hasattr(paceline.data, name)
    assert set(paceline.data.__all__) <= set(dir(paceline.data))
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        paceline.data.Loader  # noqa: B018


def test_settings_and_sources_do_not_import_torch() -> None:
    names = (
        "settings",
        "sources.layouts",
        "sources.opening",
        "image",
        "prefetch",
        "pack.inspect",
        "pack.pack",
    )
    modules = ", ".join(f"paceline.data.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
