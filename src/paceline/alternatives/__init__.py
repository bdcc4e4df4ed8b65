"""Methods of the literature that are not the default, one module or sub-package each.

`PROVIDES` has what they provide: by kind the name that a setting gives, and its place. Nothing else is
imported here, so that each module can be removed.
"""

from __future__ import annotations

_EIGHT_BIT = ("int8", "float8_e4m3", "float8_e5m2")
_OPTIMIZERS = {
    "rmsprop_warmup": "alternatives.rms_warmup.settings:RmspropWarmupSettings",
    "svrg": "alternatives.svrg.settings:SvrgSettings",
    "halp": "alternatives.svrg.settings:HalpSettings",
    "lp_svrg": "alternatives.svrg.settings:LpSvrgSettings",
    "lp_sgd": "alternatives.svrg.settings:LpSgdSettings",
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
    "renamed settings": {
        **dict.fromkeys(
            ("comm.error_feedback", *(f"comm.{name}" for name in _EIGHT_BIT)),
            "alternatives.eight_bit.wires:RENAMED",
        ),
        **dict.fromkeys(
            ("comm.servers", "comm.staleness"), "alternatives.asynchronous.settings:RENAMED"
        ),
        "model.norm_group": "alternatives.synced_norms.settings:RENAMED",
        **dict.fromkeys(("run.rebalance", "run.shares"), "alternatives.unequal.settings:RENAMED"),
        **dict.fromkeys(
            (
                "optim.bits",
                "optim.center_epochs",
                "optim.halp_mu",
                "optim.halp",
                "optim.lp_svrg",
                "optim.lp_sgd",
            ),
            "alternatives.svrg.settings:RENAMED",
        ),
        **dict.fromkeys(
            ("optim.rms_center_epochs", "optim.rms_width_epochs"),
            "alternatives.rms_warmup.settings:RENAMED",
        ),
        **dict.fromkeys(
            (
                "optim.cycle_decay",
                "optim.cycle_epochs",
                "optim.cycle_momentum",
                "optim.one_cycle",
                "optim.triangular",
            ),
            "alternatives.cycles:RENAMED",
        ),
    },
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
