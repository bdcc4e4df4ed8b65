"""Refusals of a user's mistake: by field, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.core.errors import ConfigError


@contextmanager
def refused(field: str, words: str | None = None) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expects a ConfigError of `field` whose text matches `words`."""
    with pytest.raises(ConfigError, match=words) as caught:
        yield caught
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
