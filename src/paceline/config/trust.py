"""Decides which code a recipe or checkpoint may name, because such a file can come from a stranger.

The command line and Python programs may name any code. A recipe, the `config.toml` of a run and a
checkpoint may not: without `--trust` (in Python `trust=True`) they may name only the code that this
module lists. `run_config` calls `check_trust` for every configuration from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.config.settings import LOSSES
from paceline.core.errors import ConfigError
from paceline.core.imports import PYTHON
from paceline.core.settings import parse_arguments
from paceline.models.settings import ZOOS, split_name
from paceline.optim.registry import optimizer_names

# Loss functions of outputs and targets. The namespaces also contain modules and private functions.
LOSSES_OF_TORCH: Mapping[str, frozenset[str]] = {
    "torch.nn": frozenset((
        "BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "HingeEmbeddingLoss", "HuberLoss",
        "KLDivLoss", "L1Loss", "MSELoss", "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss",
        "MultiMarginLoss", "NLLLoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss",
    )),
    "torch.nn.functional": frozenset((
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy",
        "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss", "multi_margin_loss",
        "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
        "smooth_l1_loss", "soft_margin_loss",
    )),
}  # fmt: skip
# Arguments of timm's and torchvision's factories that only change numbers in the network. Other arguments
# can read files, hubs or pickles.
PLAIN_MODEL_ARGUMENTS = frozenset((
    "attention_dropout", "attn_drop_rate", "aux_logits", "drop_block_rate", "drop_path_rate",
    "drop_rate", "dropout", "init_values", "init_weights", "patch_drop_rate", "pos_drop_rate",
    "proj_drop_rate", "stochastic_depth_prob", "transform_input", "zero_init_last",
    "zero_init_residual",
))  # fmt: skip

# Names of timm's models have tags and dots; colons and slashes are those of hubs and folders.
_ZOO_NAME = re.compile(r"[\w.\-]+")
_CLASS_OF_TORCH = re.compile(r"torch\.optim:[A-Z]\w*")


def _foreign_model(values: Mapping[str, Any]) -> str:
    name = values["model.name"]
    source, rest = split_name(name)
    if source in ZOOS:
        return "" if _ZOO_NAME.fullmatch(rest) else "reads a hub or a folder"
    if source:
        return "" if source == PYTHON else f"runs code of the module {source}"
    return ""


def _foreign_model_arguments(values: Mapping[str, Any]) -> str:
    for name, value in parse_arguments("model.arguments", values["model.arguments"]).items():
        if name not in PLAIN_MODEL_ARGUMENTS or not isinstance(value, bool | int | float):
            return f"has {name!r}, which may read a file or run code"
    return ""


def _foreign_optimizer(values: Mapping[str, Any]) -> str:
    """Accepts any class name of `torch.optim`; `create_optimizer` checks the class itself."""
    name = values["optim.name"]
    module, colon, _ = name.partition(":")
    if name in optimizer_names() or (colon and module == PYTHON) or _CLASS_OF_TORCH.fullmatch(name):
        return ""
    return f"runs code of the module {module}"


def _foreign_optimizer_arguments(values: Mapping[str, Any]) -> str:
    if not values["optim.arguments"].strip() or not _foreign_optimizer(values):
        return ""
    return f"is passed to {values['optim.name']}"


def _foreign_loss(values: Mapping[str, Any]) -> str:
    name = values["run.loss"]
    module, colon, function = name.partition(":")
    known = LOSSES_OF_TORCH.get(module, frozenset())
    if name in LOSSES or (colon and module == PYTHON) or function in known:
        return ""
    return f"runs code of the module {module}"


# The settings that decide which code runs. Each function returns the reason why the value needs trust, or
# an empty text.
CODE_SETTINGS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "model.name": _foreign_model,
    "model.arguments": _foreign_model_arguments,
    "optim.name": _foreign_optimizer,
    "optim.arguments": _foreign_optimizer_arguments,
    "run.loss": _foreign_loss,
}


def check_trust(values: Mapping[str, Any], named: Mapping[str, Any], origin: object) -> None:
    """Checks the code that a file names; raises ConfigError for code that needs trust.

    Args:
        values: All settings as `{"section.key": value}`.
        named: The values that the command line or a program has set; these may name any code.
        origin: The file, for the message.
    """
    for name, reason_against in CODE_SETTINGS.items():
        if values[name] != named.get(name) and (reason := reason_against(values)):
            raise ConfigError(
                name, values[name], f"is named by {origin} and {reason}",
                "add --trust (in Python trust=True) if you trust that file",
            )  # fmt: skip
