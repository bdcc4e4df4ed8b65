"""Settings of the optimizer and its schedule: the section `[optim]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.settings import parse_arguments
from paceline.optim.batch_growth import BatchGrowth
from paceline.optim.setting_rules import ADAM_LR_BASES, check_optim


@dataclass(frozen=True)
class OptimSettings:
    """The update rule and the learning-rate schedule; docs/optimizers.md has the equations."""

    name: str = "sgd"
    """`sgd`, `lars`, `muon`, `soap`, `adamw`, `lamb`, `rmsprop_warmup`, `svrg`, `halp`, `lp_svrg`,
    `lp_sgd`, or a class of torch.optim or of another module, as in `torch.optim:RAdam`."""
    arguments: str = ""
    """Keyword arguments for the class of `module:Class` beside the rate, as a TOML table:
    `{betas = [0.9, 0.95]}`."""
    lr: float | None = None
    """Peak learning rate; unset, `lr_base` · global batch / `lr_base_batch` (linear scaling)."""
    lr_base: float = 0.1
    """Peak learning rate at a global batch of `lr_base_batch`; the default stands for 0.00025 with
    `adamw` and 0.000625 with `lamb`."""
    lr_base_batch: int = 256
    """Global batch that `lr_base` refers to."""
    scaling: str = "off"
    """`auto` derives optimizer, rate, trust coefficient, warm-up, batch-norm group and averaging for the
    global batch from a recipe that works at `known_good_batch`; `off` uses the settings as they are."""
    known_good_batch: int | None = None
    """Global batch at which the recipe is known to work, for `scaling`; unset, the recipe's own
    `run.global_batch_size`."""
    known_good_optimizer: str = ""
    """Optimizer of the recipe at that batch; empty, `name`; filled in from the recipe."""
    known_good_lr: float | None = None
    """Peak learning rate of the recipe at that batch; unset, that of these settings; filled in from the
    recipe where the command line gives another `lr`."""
    known_good_momentum: float | None = None
    """Momentum of the recipe; filled in from it where the command line gives another `momentum`."""
    scaling_keeps: tuple[str, ...] = ()
    """Settings that `scaling` leaves as they are; filled in with those given on the command line."""
    momentum: float = 0.9
    """Momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    beta1: float = 0.9
    """AdamW and LAMB: decay of the average of gradients."""
    beta2: float = 0.999
    """AdamW, LAMB and SOAP: decay of the average of squared gradients; the default stands for 0.95 with
    `soap`."""
    adam_eps: float = 1e-8
    """AdamW, LAMB and `rmsprop_warmup`: added to the root of the average of squares."""
    bits: int = 8
    """`halp`, `lp_svrg` and `lp_sgd`: bits of the integers that hold the offset or the weights, 8 or
    16."""
    halp_mu: float = 0.1
    """`halp`: assumed strong convexity μ; the offset reaches ‖full gradient‖ / μ."""
    lp_span: float = 0.0
    """`lp_svrg` and `lp_sgd`: largest weight that the integers hold; 0 takes twice the largest initial
    weight of each tensor."""
    center_epochs: float = 1.0
    """`svrg`, `halp` and `lp_svrg`: epochs from one full gradient to the next."""
    rms_rate: float = 3e-4
    """`rmsprop_warmup`: learning rate of its RMSprop part."""
    rms_beta: float = 0.99
    """`rmsprop_warmup`: decay of the average of squared gradients."""
    rms_center_epochs: float = 10.0
    """`rmsprop_warmup`: epoch at which SGD and RMSprop have equal shares."""
    rms_width_epochs: float = 5.0
    """`rmsprop_warmup`: width of the transition in epochs; it is over half of it after
    `rms_center_epochs`."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; larger ones are scaled down to it; 0 clips nothing."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one before it; 1 gives all layers the same."""
    weight_decay: float = 1e-4
    """Weight decay of weights; biases and normalization have none unless `decay_bias_norm`."""
    decay_bias_norm: bool = False
    """Apply weight decay to biases and normalization parameters too."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up."""
    warmup_start: float = 0.0
    """Learning rate at the start of warm-up."""
    warmup_max_share: float = 1.0
    """Largest share of the run that warm-up may take; the command line sets 0.2, or the share in
    the recipe if larger, and 1 if `--warmup-epochs` is given."""
    schedule: str = "cosine"
    """Decay after warm-up: `constant`, `cosine`, `poly`, `step` or `piecewise`; `one_cycle` and
    `triangular` rise by themselves and have no warm-up; `range` is that of `paceline lr-find`."""
    schedule_free: float = 0.0
    """Schedule-free training: share of the average in the weights at which gradients are taken; 0 is off,
    0.9 common; needs `schedule = "constant"`."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which `step` multiplies the rate by `decay_rate`, and `piecewise` takes the next of
    `decay_factors`."""
    decay_factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)
    """`piecewise`: shares of the peak rate, before the first of `decay_epochs` and from each of
    them on."""
    cycle_floor: float = 0.1
    """`one_cycle` and `triangular`: lowest rate of a cycle, as a share of the peak rate."""
    cycle_momentum: tuple[float, ...] = (0.85, 0.95)
    """`one_cycle` and `triangular`: momentum (β₁ of AdamW and LAMB) at the highest and at the lowest
    rate of a cycle; an empty list keeps `momentum`."""
    cycle_tail: float = 0.1
    """`one_cycle`: share of the run after the cycle, in which the rate falls on to `lr_end`."""
    cycle_epochs: float = 8.0
    """`triangular`: epochs of one cycle, up and down."""
    cycle_decay: float = 1.0
    """`triangular`: factor of a cycle's height to the next one's; 0.5 is Smith's `triangular2`."""
    range_lr: tuple[float, float] = (1e-5, 10.0)
    """`range`: first and last rate; it grows by the same factor with every step."""
    range_steps: int = 100
    """`range`: steps from the first rate to the last."""
    decay_rate: float = 0.1
    """Factor of each decay of `step`."""
    poly_power: float = 2.0
    """Exponent of `poly`."""
    lr_end: float = 0.0
    """Final learning rate of `cosine`, `poly` and `one_cycle`."""
    decay_over_epochs: float | None = None
    """Epoch at which `cosine` and `poly` reach `lr_end`, warm-up included; unset, the end of the
    run."""
    batch_schedule: str = ""
    """Global batches by epoch, as in `0:256,8:1024,12:4096`, or `x4`: four times the batch at each of
    `decay_epochs`; empty keeps the batch."""
    batch_limit: int | None = None
    """Largest global batch that a rule such as `x4` reaches; from then on the rate decays alone."""
    batch_rate: str = "auto"
    """How the rate follows the batch of `batch_schedule`: `constant` (not at all), `linear` (times batch
    / first batch), `sqrt`, or `auto` (`linear` with a rule such as `x4`, else `constant`)."""
    trust_coefficient: float = 0.001
    """Trust coefficient η of LARS and Muon; LAMB has none."""
    eps: float = 0.0
    """Added to the denominator of the trust ratio."""
    lr_in_momentum: bool = True
    """LARS: multiply by the learning rate before the momentum (MLPerf, TF2) instead of after it."""
    clip: bool = False
    """LARS and LAMB: limit the local learning rate to the global one, as in LARC."""
    adapt_bias_norm: bool = False
    """Apply the trust ratio to biases and normalization parameters too."""
    orthogonal: str = "filters"
    """Muon: layers with orthogonalized momentum, `filters` (convolutions) or `all` (linear layers
    too)."""
    soap_interval: int = 10
    """SOAP: steps between two updates of the basis."""
    share_products: str = "auto"
    """Muon and SOAP: ranks share the matrix products out, each computes its part and all get the
    results: `on`, `off`, or `auto` (with several ranks, unless they share a GPU or use Gloo on GPUs)."""
    muon_products: str = "auto"
    """Muon on a GPU: matrix products by Triton's `kernels` or by `torch`; `auto`: kernels, unless ranks
    share the products out."""
    trust_log_interval: int = 0
    """Steps between two records of the trust ratios in `metrics.jsonl`; 0 records none."""
    in_half: bool = False
    """Ablation: compute the update in the parameters' own format, without master weights."""
    fused: str = "auto"
    """Implementation of the update: `triton`, `foreach`, or `auto` (Triton on a GPU where it is
    installed)."""

    def __post_init__(self) -> None:
        check_optim(self)

    @property
    def is_class(self) -> bool:
        """Whether `name` is `module:Class`."""
        return ":" in self.name

    @property
    def has_default_base(self) -> bool:
        """Whether `lr_base` is as it is where nobody sets it."""
        return self.lr_base == OptimSettings.lr_base

    @property
    def batch_growth(self) -> BatchGrowth:
        """`batch_schedule`, read."""
        return BatchGrowth.parse(self.batch_schedule)

    def arguments_table(self) -> dict[str, Any]:
        """`arguments` as a dictionary."""
        table = parse_arguments("optim.arguments", self.arguments)
        return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}

    def peak_lr(self, global_batch: int) -> float:
        """Linear scaling (Goyal et al. 2017), unless the rate is given as it is."""
        if self.lr is not None:
            return self.lr
        base = self.lr_base
        if self.has_default_base:
            base = ADAM_LR_BASES.get(self.name, base)
        return base * global_batch / self.lr_base_batch
