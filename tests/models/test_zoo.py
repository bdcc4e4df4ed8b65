"""Models of timm and torchvision on a CPU, with the real packages: `make models-test`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.listings import list_models
from paceline.core.errors import ConfigError
from paceline.models import ModelSettings, create_model
from paceline.models.factories import zoo_models
from small_runs import run_small

# Packages warn about one another.
pytestmark = pytest.mark.filterwarnings("ignore")
ZOO = ["timm:convnext_atto", "timm:vit_tiny_patch16_224", "torchvision:mobilenet_v3_small"]


def importable(package: str) -> None:
    """Skips the test if `package` is not installed or does not import with this torch."""
    try:
        __import__(package)
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"{package} cannot be imported: {problem}")


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_a_zoo_trains(tmp_path: Path, name: str) -> None:
    importable(name.partition(":")[0])
    found = run_small(
        tmp_path / "run", model__name=name, data__image_size=64, data__channels=3,
        data__mean=[0.5] * 3, data__std=[0.25] * 3, data__synthetic_samples=32, run__epochs=1,
    )  # fmt: skip
    assert found.summary["stopped_by"] == "finished"
    assert found.summary["top1"] is not None


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_names_are_listed_and_mistakes_found(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    importable(package)
    assert "resnet18" in (zoo_models(package, "resnet1*") or [])
    list_models(f"{package}:resnet1*", as_json=False)
    assert f"{package}:resnet18" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        create_model(ModelSettings(name=f"{package}:resnet81"), num_classes=4)
    assert package in sys.modules
