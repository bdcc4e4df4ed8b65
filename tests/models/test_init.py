"""The room's public names."""

import pytest

import paceline.models


def test_public_names_resolve_to_their_files():
    from paceline.models import ModelSettings, create_model, parameter_groups

    assert create_model.__module__ == "paceline.models.registry"
    assert parameter_groups.__module__ == "paceline.models.registry"
    assert ModelSettings.__module__ == "paceline.models.settings"
    assert set(paceline.models.__all__) <= set(dir(paceline.models))


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lars'"):
        _ = paceline.models.lars
