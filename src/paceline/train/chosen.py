"""What a run has chosen by itself, in words, for display and record."""

from __future__ import annotations

from torch import nn

from paceline.config import RunConfig
from paceline.data import BatchPlan, describe_channels
from paceline.models.freeze import count_frozen
from paceline.models.names import MODEL_NAMES
from paceline.optim.batch_growth import describe_stages
from paceline.optim.schedule import LrSchedule
from paceline.plan.rehearsal import ClusterClock
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.inputs import RunInputs
from paceline.train.model_checks import given_name
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder
from paceline.train.run_state import changes
from paceline.train.step_parts import StepParts


def describe_rehearsal(config: RunConfig, clock: ClusterClock | None) -> dict[str, str]:
    settings = config.rehearse
    if not settings.ranks:
        return {}
    unknown = "none: give --gpu, --profile or --cluster for the cluster's time"
    return {
        "rehearsal": f"of {settings.ranks:,} ranks on {settings.nodes:,} node(s), in one process",
        "clock": unknown if clock is None else clock.describe(),
    }


def given_objects(components: Components) -> dict[str, str]:
    """Objects of the program that the command line cannot make again."""
    names = [name for name in components.names() if name != "callbacks"]
    if not names:
        return {}
    listed = ", ".join(name.replace("_", " ") for name in names)
    return {
        "given in Python": f"{listed}; paceline eval, predict, export and --resume cannot make these: "
        "use this program, or name them as package.module:name"
    }


def describe_data(inputs: RunInputs) -> str:
    source = inputs.source
    return (
        f"{source.kind}, {len(source):,} training and {len(inputs.validation):,} "
        f"validation images, {len(source.classes)} classes"
    )


def data_notes(
    config: RunConfig, inputs: RunInputs, components: Components, described: str
) -> dict[str, str]:
    """What the user should know about the data beyond what `described` says of the input."""
    sources = (inputs.source, inputs.validation)
    notes = [s.note for s in sources if s.note and s.note not in described]
    own = {"augment": components.augment, "device_augment": components.device_augment}
    found = {
        "data notes": "; ".join(dict.fromkeys(notes)),
        "channels": describe_channels(inputs.source, config.data.channels),
        "augmentation": ", ".join(
            f"own {name}" for name, value in own.items() if value is not None
        ),
    }
    return {name: note for name, note in found.items() if note}


def describe_model(config: RunConfig, model: nn.Module, components: Components) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    stem = config.model.stem_for(config.data.image_size)
    is_resnet = config.model.name in MODEL_NAMES and config.model.name.startswith("resnet")
    with_stem = f" with the {stem} stem" if is_resnet else ""
    frozen = count_frozen(model)
    with_frozen = f", {frozen:,} of them frozen" if frozen else ""
    if components.model is not None:
        return (
            f"{given_name(components.model)} (given in Python), {weights:,} parameters{with_frozen}"
        )
    return f"{config.model.name}{with_stem}, {weights:,} parameters{with_frozen}"


def optional_notes(
    config: RunConfig,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    parts: StepParts,
    pretrained: list[str],
    schedule: LrSchedule,
    plan: BatchPlan,
) -> dict[str, str]:
    salvaged = ""
    if checkpoint is not None and checkpoint.salvaged_by is not None:
        salvaged = (
            f"not bit-exact: salvaged by rank {checkpoint.salvaged_by} after the loss of another rank; "
            "weights and momenta are exact, batch-norm statistics are of that rank only"
        )
    notes = {
        "warm-up": schedule.describe_cut(),
        "noise scale": _describe_noise_scale(config, plan),
        "batch schedule": describe_stages(plan.global_batch, plan.growth) if plan.growth else "",
        "average": parts.average.describe(plan.samples / plan.last_batch) if parts.average else "",
        "pretrained": "; ".join(pretrained),
        "resume": "; ".join(filter(None, (folder.note, salvaged))),
        "changed on resume": changes(checkpoint, config, LOCAL_SETTINGS) if checkpoint else "",
    }
    return {name: note for name, note in notes.items() if note}


def _describe_noise_scale(config: RunConfig, plan: BatchPlan) -> str:
    if not config.run.noise_scale:
        return ""
    parts = -(-plan.global_batch // plan.micro_batch)
    if parts < 2:
        return (
            "not available: a step is one micro-batch; use several ranks or a smaller --batch-size"
        )
    return f"estimated from {parts} micro-batches of {plan.micro_batch} per step"
