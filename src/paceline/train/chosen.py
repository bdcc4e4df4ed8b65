"""What a run has chosen by itself, in words, for display and record."""

from __future__ import annotations

from torch import nn

from paceline.config import RunConfig
from paceline.data import BatchPlan, describe_channels
from paceline.models.names import MODEL_NAMES
from paceline.models.registry import count_frozen
from paceline.optim.batch_growth import describe_stages
from paceline.plan.rehearsal import ClusterClock
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.fast_path import describe_norms
from paceline.train.inputs import RunInputs
from paceline.train.model_checks import given_name
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder
from paceline.train.run_state import changes
from paceline.train.step_parts import StepParts
from paceline.train.training import Training


def describe_run(
    training: Training,
    inputs: RunInputs,
    components: Components,
    checkpoint: Checkpoint | None,
    parts: StepParts,
    *,
    threads: str,
    shares: str,
    scaling: str,
    model_notes: list[str],
    pretrained: list[str],
) -> dict[str, str]:
    """In the order in which it is shown, without what does not apply."""
    config, group, plan, step = training.config, training.group, training.plan, training.step
    loader = step.loader.describe()
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": group.topology.launcher,
        "threads": threads,
        "data": _describe_data(inputs),
        "input": loader,
        "model": _describe_model(config, training.model, components),
        "model notes": "; ".join(model_notes),
        **_describe_input(config, inputs, components, loader),
        **parts.describe(),
        "batch": training.sizes.describe(plan.world_size),
        "shares": shares,
        "peak_lr": f"{training.state.peak_lr:g}",
        "scaling": scaling,
        "full gradient": step.anchors.describe() if step.anchors else "",
        **describe_norms(config, group, step.norm_group),
        "warm-up": training.schedule.describe_cut(),
        "noise scale": _describe_noise_scale(config, plan),
        "batch schedule": describe_stages(plan.global_batch, plan.growth) if plan.growth else "",
        "average": parts.average.describe(plan.samples / plan.last_batch) if parts.average else "",
        "pretrained": "; ".join(pretrained),
        "resume": _describe_resume(training.folder, checkpoint),
        "changed on resume": changes(checkpoint, config, LOCAL_SETTINGS) if checkpoint else "",
        "exchange state": "; ".join(training.state.notes),
        **_describe_rehearsal(config, training.clock),
        **_given_objects(components),
    }
    return {name: text for name, text in chosen.items() if text}


def _describe_rehearsal(config: RunConfig, clock: ClusterClock | None) -> dict[str, str]:
    settings = config.rehearse
    if not settings.ranks:
        return {}
    unknown = "none: give --gpu, --profile or --cluster for the cluster's time"
    return {
        "rehearsal": f"of {settings.ranks:,} ranks on {settings.nodes:,} node(s), in one process",
        "clock": unknown if clock is None else clock.describe(),
    }


def _given_objects(components: Components) -> dict[str, str]:
    """Objects of the program that the command line cannot make again."""
    names = [name for name in components.names() if name != "callbacks"]
    if not names:
        return {}
    listed = ", ".join(name.replace("_", " ") for name in names)
    return {
        "given in Python": f"{listed}; paceline eval, predict, export and --resume cannot make these: "
        "use this program, or name them as package.module:name"
    }


def _describe_data(inputs: RunInputs) -> str:
    source = inputs.source
    return (
        f"{source.kind}, {len(source):,} training and {len(inputs.validation):,} "
        f"validation images, {len(source.classes)} classes"
    )


def _describe_input(
    config: RunConfig, inputs: RunInputs, components: Components, described: str
) -> dict[str, str]:
    """What the user should know about the data beyond what `described` says of the input."""
    sources = (inputs.source, inputs.validation)
    notes = [s.note for s in sources if s.note and s.note not in described]
    own = {"augment": components.augment, "device_augment": components.device_augment}
    return {
        "data notes": "; ".join(dict.fromkeys(notes)),
        "channels": describe_channels(inputs.source, config.data.channels),
        "augmentation": ", ".join(
            f"own {name}" for name, value in own.items() if value is not None
        ),
    }


def _describe_model(config: RunConfig, model: nn.Module, components: Components) -> str:
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


def _describe_resume(folder: RunFolder, checkpoint: Checkpoint | None) -> str:
    salvaged = ""
    if checkpoint is not None and checkpoint.salvaged_by is not None:
        salvaged = (
            f"not bit-exact: salvaged by rank {checkpoint.salvaged_by} after the loss of another rank; "
            "weights and momenta are exact, batch-norm statistics are of that rank only"
        )
    return "; ".join(filter(None, (folder.note, salvaged)))


def _describe_noise_scale(config: RunConfig, plan: BatchPlan) -> str:
    if not config.run.noise_scale:
        return ""
    parts = -(-plan.global_batch // plan.micro_batch)
    if parts < 2:
        return (
            "not available: a step is one micro-batch; use several ranks or a smaller --batch-size"
        )
    return f"estimated from {parts} micro-batches of {plan.micro_batch} per step"
