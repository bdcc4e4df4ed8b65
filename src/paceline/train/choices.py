"""Settings that a recipe chooses when the run starts, and the time budget of a run.

Rank 0 looks at the data and the machine and chooses; the other ranks receive the choices. A resumed run
keeps the settings of its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from paceline.comm.group import Group
from paceline.config import CHOOSERS, RunConfig, RunSettings, with_choices
from paceline.core.errors import PacelineError
from paceline.core.host import StartUp
from paceline.core.settings import flatten, unflatten
from paceline.data import BatchPlan, Source, open_unsplit
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.machine import choose_threads
from paceline.train.run_folder import LOCAL_SETTINGS

# Steps at the start of a run that are slower than others.
_SLOW_STEPS = 2
# The part of the remaining time to fill, because other programs may slow the run down later.
_SHARE = 0.95
# Time to write the last checkpoint, the weights and the report.
_END_S = 3.0


@dataclass(frozen=True)
class TimeBudget:
    """The time for a whole run, from the start of the command to its end.

    Attributes:
        seconds: The time.
    """

    seconds: float

    def epochs(
        self,
        spent_s: float,
        steps_s: Sequence[float],
        eval_s: float,
        plan: BatchPlan,
        run: RunSettings,
    ) -> int:
        """Returns the number of epochs that fit, at least 2, as one epoch and an evaluation are done.

        Args:
            spent_s: The time until now.
            steps_s: The time of each step.
            eval_s: The time of the evaluation.
            plan: The batches of the run.
            run: The settings of the run.
        """
        usual = steps_s[_SLOW_STEPS:] or steps_s
        step_s = sum(usual) / max(len(usual), 1)
        epoch_s = step_s * plan.steps_per_epoch + eval_s / run.eval_interval_epochs
        left_s = _SHARE * (self.seconds - spent_s) - eval_s - _END_S
        return max(2, 1 + int(left_s / max(epoch_s, 1e-9)))


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a recipe knows when it chooses.

    Attributes:
        config: The settings, with defaults for those that the user has not given.
        given: The settings that the user has given.
        source: All images that may be used for training.
        validation: Evidence of a validation set; empty if there is none.
        device: The device of this rank.
        ranks: Number of ranks.
        threads: Number of CPU threads of this rank.
        own_model: True if the program gave the model as an object.
        spent_s: Time since the start of the command in seconds.
    """

    config: RunConfig
    given: Mapping[str, Any]
    source: Source
    validation: str
    device: torch.device
    ranks: int
    threads: int
    own_model: bool = False
    spent_s: float = 0.0


@dataclass(frozen=True)
class Choices:
    """What a recipe has chosen.

    Attributes:
        values: The chosen settings, as `{"section.key": value}`.
        reasons: A text for each choice, by name, in the order of their display.
        settles: Settings that the user has given as a word for which `values` has the final value.
    """

    values: Mapping[str, Any]
    reasons: Mapping[str, str]
    settles: tuple[str, ...] = ()

    def apply(self, config: RunConfig) -> RunConfig:
        """Returns the configuration with the chosen settings."""
        return with_choices(config, unflatten(self.values), self.settles)


class Chooser(Protocol):
    """A recipe that chooses settings when the run starts."""

    def choose(self, situation: Situation) -> Choices:
        """Chooses settings; raises a PacelineError if the data or the time budget do not suffice."""
        ...


@dataclass(frozen=True)
class Chosen:
    """The settings of a run after its recipe has chosen.

    Attributes:
        config: The settings.
        reasons: A text for each choice, by name.
        budget: The time for the whole run; None if there is no limit.
    """

    config: RunConfig
    reasons: Mapping[str, str] = field(default_factory=dict)
    budget: TimeBudget | None = None


def choose_settings(
    config: RunConfig, group: Group, components: Components, checkpoint: Checkpoint | None,
    startup: StartUp,
) -> Chosen:  # fmt: skip
    """Lets the recipe choose the settings of the run, if it does so. A collective.

    Args:
        config: The settings as they were loaded.
        group: The ranks.
        components: Python objects that replace objects that the settings name.
        checkpoint: The checkpoint of a resumed run, which keeps its settings.
        startup: The time until now.

    Raises:
        PacelineError: On all ranks, if rank 0 cannot choose.
    """
    pending = config.run.pending
    if pending is None:
        return Chosen(config)
    budget = None if config.run.minutes is None else TimeBudget(60 * config.run.minutes)
    if checkpoint is not None:
        # Pretrained weights have done their work.
        kept = Choices(_lasting(checkpoint), {}, ("run.pretrained",)).apply(config)
        return Chosen(kept, {"recipe": f"{pending.recipe}, as at the start of the run"}, budget)
    chosen, error = None, None
    if group.rank == 0:
        try:
            threads = choose_threads(config, group.topology)
            spent_s = sum(startup.seconds.values())
            with look(
                config, components, group.device, group.world_size, threads, spent_s
            ) as situation:
                chosen = choices_of(situation)
        except PacelineError as caught:
            error = caught
    group.agree("recipe", error)
    sent = None if chosen is None else json.dumps(asdict(chosen)).encode()
    same = Choices(**json.loads(group.broadcast_bytes(sent)))
    startup.end("recipe")
    return Chosen(same.apply(config), same.reasons, budget)


def choices_of(situation: Situation) -> Choices:
    """Returns what the recipe of the run chooses; values that the user has given are left out."""
    pending = situation.config.run.pending
    assert pending is not None
    chooser: Chooser = CHOOSERS.get(pending.recipe, "recipe")
    return chooser.choose(situation)


@contextmanager
def look(
    config: RunConfig, components: Components, device: torch.device, ranks: int, threads: int,
    spent_s: float = 0.0,
) -> Iterator[Situation]:  # fmt: skip
    """Opens the training data for a recipe that chooses settings.

    Args:
        config: A configuration with `RunSettings.pending`.
        components: Python objects that replace objects that the settings name.
        device: The device of this rank.
        ranks: Number of ranks.
        threads: Number of CPU threads of this rank.
        spent_s: Time since the start of the command in seconds.
    """
    pending = config.run.pending
    assert pending is not None
    given = components.train_data
    source, validation = open_unsplit(config.data, given, components.val_data)
    try:
        yield Situation(
            config=config, given=pending.given, source=source, validation=validation, device=device,
            ranks=ranks, threads=threads, own_model=components.model is not None, spent_s=spent_s,
        )  # fmt: skip
    finally:
        if given is None:
            source.close()


def _lasting(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the settings of a checkpoint without those of one process, such as the run folder."""
    stored = flatten(checkpoint.config)
    return {name: value for name, value in stored.items() if name not in LOCAL_SETTINGS}
