"""Methods from the literature that are not the default; each has its own module or package.

`PROVIDES` lists what the modules add (strategies, optimizers and so on), by name and import path. This
file imports none of the modules, so each of them can be removed.
"""

from __future__ import annotations

_EIGHT_BIT = ("int8", "float8_e4m3", "float8_e5m2")
_OPTIMIZERS = {
    "rmsprop_warmup": "alternatives.rms_warmup.settings:RmspropWarmupSettings",
    "svrg": "alternatives.svrg.settings:SvrgSettings",
    "halp": "alternatives.svrg.settings:HalpSettings",
}
_SCHEDULES = {
    "one_cycle": "alternatives.cycles:OneCycle",
    "triangular": "alternatives.cycles:Triangular",
}

PROVIDES: dict[str, dict[str, str]] = {
    "wires": {name: f"alternatives.eight_bit.wires:{name.upper()}" for name in _EIGHT_BIT},
    "comm settings": dict.fromkeys(
        (*_EIGHT_BIT, "eight_bit"), "alternatives.eight_bit.wires:EightBitSettings"
    ),
    "optimizers": _OPTIMIZERS,
    "schedules": _SCHEDULES,
    "gradient sources": {"svrg": "alternatives.svrg.source:SvrgSource"},
    "optim settings": {**_OPTIMIZERS, **_SCHEDULES, "cycle": "alternatives.cycles:Cycle"},
    "strategies": {
        "asynchronous": "alternatives.asynchronous.strategy:Asynchronous",
        "synced_norms": "alternatives.synced_norms.strategy:SyncedNorms",
        "unequal": "alternatives.unequal.strategy:Unequal",
    },
    "run settings": {
        "asynchronous": "alternatives.asynchronous.settings:AsynchronousSettings",
        "synced_norms": "alternatives.synced_norms.settings:SyncedNormsSettings",
        "unequal": "alternatives.unequal.settings:UnequalSettings",
    },
}
