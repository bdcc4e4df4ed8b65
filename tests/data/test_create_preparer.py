from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.data.augmentation.augment import EvalTransform
from paceline.data.decoding import create_preparer as creating
from paceline.data.decoding.create_preparer import create_preparer
from paceline.data.decoding.preparer import PillowPreparer, Preparer
from paceline.data.region.library import RegionUnavailableError, region_library
from paceline.data.region.preparer import RegionPreparer
from paceline.data.settings import DataSettings

Make = Callable[..., DataSettings]


@pytest.fixture
def jpeg_source(memory_source: Any) -> Any:
    source = memory_source(200)
    source.name = lambda i: f"train-0.tar:{i}.JPEG" if i % 2 else f"train-0.tar:{i}.png"
    return source


@pytest.fixture
def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RegionUnavailableError("no C compiler", "install gcc")

    monkeypatch.setattr(creating, "region_library", refuse)


@pytest.fixture
def _there() -> None:
    try:
        region_library()
    except RegionUnavailableError as error:
        pytest.skip(f"no region decoder here: {error}")


def create(source: Any, chosen: DataSettings) -> Preparer:
    return create_preparer(source, EvalTransform(chosen), chosen)


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("decoder", ["auto", "region"])
def test_the_region_decoder_where_it_is(
    jpeg_source: Any, small_settings: Make, decoder: str
) -> None:
    prepare = create(jpeg_source, small_settings(decoder=decoder))
    assert isinstance(prepare, RegionPreparer)
    assert prepare.describe().startswith("region decoder, built against libjpeg-turbo ")


@pytest.mark.usefixtures("_missing")
def test_a_fall_back_says_why(jpeg_source: Any, small_settings: Make) -> None:
    prepare = create(jpeg_source, small_settings(decoder="auto"))
    assert isinstance(prepare, PillowPreparer)
    assert prepare.describe() == "Pillow decodes; no region decoder: no C compiler"


@pytest.mark.usefixtures("_missing")
def test_what_is_insisted_on_and_missing(jpeg_source: Any, small_settings: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        create(jpeg_source, small_settings(decoder="region"))
    assert str(caught.value) == (
        "data.decoder = 'region': no C compiler; install gcc, or set it to 'auto'"
    )


def test_pillow_on_demand(jpeg_source: Any, small_settings: Make) -> None:
    prepare = create(jpeg_source, small_settings(decoder="pillow"))
    assert isinstance(prepare, PillowPreparer)
    assert prepare.describe() == "Pillow decodes"


@pytest.mark.usefixtures("_missing")
def test_a_source_without_jpegs_does_not_ask_for_the_library(
    memory_source: Any, small_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creating, "region_library", lambda: pytest.fail("asked"))
    source = memory_source(50)
    prepare = create(source, small_settings(decoder="auto"))
    assert isinstance(prepare, PillowPreparer)
    assert prepare.describe() == ""
    assert source.reads == []


def test_an_empty_name_or_source(memory_source: Any, small_settings: Make) -> None:
    assert create(memory_source(0), small_settings()).describe() == ""


@pytest.mark.parametrize("decoder", ["nvjpeg", "dali"])
def test_a_decoder_of_the_gpu_is_no_host_s(
    jpeg_source: Any, small_settings: Make, decoder: str
) -> None:
    chosen = replace(small_settings(), decoder=decoder)
    with pytest.raises(ConfigError, match=f"data.decoder = '{decoder}': decodes on a GPU"):
        create(jpeg_source, chosen)
