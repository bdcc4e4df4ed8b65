"""Methods of the literature that are not the default, one module or sub-package each.

`PROVIDES` has what they provide: by kind the name that a setting gives, and its place. Nothing else is
imported here, so that each module can be removed.
"""

from __future__ import annotations

_OPTIMIZERS = {
    "rmsprop_warmup": "alternatives.rms_warmup_settings:RmspropWarmupSettings",
    "svrg": "alternatives.svrg_settings:SvrgSettings",
    "halp": "alternatives.svrg_settings:HalpSettings",
    "lp_svrg": "alternatives.svrg_settings:LpSvrgSettings",
    "lp_sgd": "alternatives.svrg_settings:LpSgdSettings",
}
_SCHEDULES = {
    "one_cycle": "alternatives.cycles:OneCycle",
    "triangular": "alternatives.cycles:Triangular",
}

PROVIDES: dict[str, dict[str, str]] = {
    "optimizers": _OPTIMIZERS,
    "schedules": _SCHEDULES,
    "optim settings": {**_OPTIMIZERS, **_SCHEDULES},
}
