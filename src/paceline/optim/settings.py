"""Settings of the optimizer and its schedule: the section `[optim]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError, nearest

OPTIMIZERS = ("lars", "muon", "sgd")
PATHS = ("auto", "foreach", "triton")
ORTHOGONALS = ("filters", "all")
SCHEDULES = ("constant", "cosine", "poly", "step")


@dataclass(frozen=True)
class OptimSettings:
    """The update rule and its learning rate over time.

    `lr` is the peak rate as it is; unset, the peak is `lr_base` · global batch / `lr_base_batch`
    (linear scaling). Warm-up rises from `warmup_start` to the peak over `warmup_epochs`, but at most over
    the share `warmup_max_share` of the run. A command line that leaves the share out gets 1 if it gives
    `--warmup-epochs`, else 0.2, or the share that warm-up has in the recipe at the recipe's own length,
    if that is more. Then `schedule` is one of constant, cosine and poly (`poly_power`), both down to
    `lr_end`, or step (× `decay_rate` at each of `decay_epochs`). `decay_over_epochs` is the epoch at
    which poly and cosine arrive, warm-up counted; unset, the run's end. Weight decay spares biases and
    normalisation unless `decay_bias_norm`.

    `name` is sgd, lars or muon. For lars: `trust_coefficient`, `eps`, `lr_in_momentum` and `clip` as in
    docs/optimizers.md; biases and normalisation keep the global rate unless `adapt_bias_norm`. For muon,
    which needs fewer steps: `trust_coefficient` (layers keep about the pace that they
    have with lars) and `eps` likewise; `orthogonal` says whose momentum is made so: filters, which are
    those of convolutions, or all, the weights of linear layers too.
    `trust_log_interval` steps pass between two records of the trust ratios (0: none). `in_half` is an
    ablation: the update in the parameters' own format, without masters. `fused` is auto (Triton on a GPU
    where it is installed), triton or foreach.
    """

    name: str = "sgd"
    lr: float | None = None
    lr_base: float = 0.1
    lr_base_batch: int = 256
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_bias_norm: bool = False
    warmup_epochs: float = 5.0
    warmup_start: float = 0.0
    warmup_max_share: float = 1.0
    schedule: str = "cosine"
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    decay_rate: float = 0.1
    poly_power: float = 2.0
    lr_end: float = 0.0
    decay_over_epochs: float | None = None
    trust_coefficient: float = 0.001
    eps: float = 0.0
    lr_in_momentum: bool = True
    clip: bool = False
    adapt_bias_norm: bool = False
    orthogonal: str = "filters"
    trust_log_interval: int = 0
    in_half: bool = False
    fused: str = "auto"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError("optim.name", self.name, "unknown", nearest(self.name, OPTIMIZERS))
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                "optim.schedule", self.schedule, "unknown", nearest(self.schedule, SCHEDULES)
            )
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ConfigError("optim.lr", self.lr, "must be above 0", "0.1 is a common start")
        if not 0 < self.lr_base < float("inf"):
            raise ConfigError("optim.lr_base", self.lr_base, "must be above 0", "try 0.1")
        if self.lr_base_batch < 1:
            raise ConfigError("optim.lr_base_batch", self.lr_base_batch, "must be at least 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError("optim.momentum", self.momentum, "must be in [0, 1)", "try 0.9")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov", True, "needs momentum", "set optim.momentum = 0.9")
        for name in (
            "weight_decay",
            "warmup_epochs",
            "warmup_start",
            "lr_end",
            "poly_power",
            "eps",
            "trust_log_interval",
        ):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"optim.{name}", value, "must be 0 or more")
        if not 0 < self.warmup_max_share <= 1:
            raise ConfigError(
                "optim.warmup_max_share", self.warmup_max_share, "must be in (0, 1]", "try 0.2"
            )
        if not 0 < self.decay_rate <= 1:
            raise ConfigError("optim.decay_rate", self.decay_rate, "must be in (0, 1]", "try 0.1")
        if list(self.decay_epochs) != sorted(self.decay_epochs):
            raise ConfigError("optim.decay_epochs", self.decay_epochs, "must rise")
        over = self.decay_over_epochs
        if over is not None and not self.warmup_epochs < over < float("inf"):
            raise ConfigError(
                "optim.decay_over_epochs",
                over,
                f"must lie behind the warm-up of {self.warmup_epochs:g} epochs",
                "leave it unset to decay over the whole run",
            )
        self._check_lars()
        self._check_muon()

    def _check_muon(self) -> None:
        if self.orthogonal not in ORTHOGONALS:
            raise ConfigError(
                "optim.orthogonal", self.orthogonal, "unknown",
                nearest(self.orthogonal, ORTHOGONALS),
            )  # fmt: skip
        if self.name != "muon":
            if self.orthogonal != "filters":
                raise ConfigError(
                    "optim.orthogonal", self.orthogonal, f"{self.name} makes nothing orthogonal",
                    "use optim.name = 'muon', or leave it out",
                )  # fmt: skip
            return
        for name, wanted in (("clip", False), ("lr_in_momentum", True), ("in_half", False)):
            if getattr(self, name) != wanted:
                raise ConfigError(
                    f"optim.{name}", getattr(self, name), "muon has no such form",
                    "leave it out, or use optim.name = 'lars'",
                )  # fmt: skip

    def _check_lars(self) -> None:
        if self.trust_log_interval and self.name == "sgd":
            raise ConfigError(
                "optim.trust_log_interval", self.trust_log_interval,
                f"{self.name} has no trust ratios", "use optim.name = 'lars', or 0",
            )  # fmt: skip
        if not 0 < self.trust_coefficient < float("inf"):
            raise ConfigError(
                "optim.trust_coefficient", self.trust_coefficient, "must be above 0", "try 0.001"
            )
        if self.fused not in PATHS:
            raise ConfigError("optim.fused", self.fused, "unknown", nearest(self.fused, PATHS))
        if self.in_half and self.fused == "triton":
            raise ConfigError(
                "optim.fused", self.fused, "has no kernels for optim.in_half", "use foreach"
            )

    def peak_lr(self, global_batch: int) -> float:
        """Linear scaling (Goyal et al. 2017), unless the rate is given as it is."""
        if self.lr is not None:
            return self.lr
        return self.lr_base * global_batch / self.lr_base_batch
