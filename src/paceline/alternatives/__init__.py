"""Methods of the literature that are not the default, one module or sub-package each.

`PROVIDES` has what they provide: by kind the name that a setting gives, and its place. Nothing else is
imported here, so that each module can be removed.
"""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "wires": {
        "int8": "alternatives.eight_bit.wires:INT8",
        "float8_e4m3": "alternatives.eight_bit.wires:E4M3",
        "float8_e5m2": "alternatives.eight_bit.wires:E5M2",
    },
    "comm settings": dict.fromkeys(
        ("int8", "float8_e4m3", "float8_e5m2"), "alternatives.eight_bit.wires:EightBitSettings"
    ),
}
