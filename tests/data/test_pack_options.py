from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.data.packing.pack_options import PackOptions


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": "jpg"}, r"--format = 'jpg': unknown; did you mean 'jpeg'\?"),
        ({"filter": "cubic"}, r"--filter = 'cubic': unknown; did you mean 'bicubic'\?"),
        ({"short_side": -1}, r"--short-side = -1: must be 0 to"),
        ({"quality": 0}, r"--quality = 0: must be 1 to 100"),
        ({"quality": 101}, r"--quality = 101: must be 1 to 100"),
        ({"shard_mib": 0}, r"--shard-mib = 0"),
        ({"shard_samples": -3}, r"--shard-samples = -3"),
        ({"max_corrupt_share": 1.0}, r"--max-corrupt-share = 1.0: must be in \[0, 1\)"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        PackOptions(**change)  # type: ignore[arg-type]


def test_the_limit_on_corrupt_images_may_change_between_tries() -> None:
    assert PackOptions(max_corrupt_share=0.5).table() == PackOptions().table()
    assert PackOptions(seed=1).table() != PackOptions().table()
