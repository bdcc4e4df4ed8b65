"""`recipe = auto`: chooses the settings of a training on the user's own images.

It looks at the images, the device and the time, and chooses model, image size, batch, epochs, optimizer,
rate, augmentation and validation split. Settings that the user has given stay, and the other choices take
them into account. `records/own-photos` tells which constants are measured and which are conventional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.units import format_duration, plural
from paceline.recipes.nets import (
    Net,
    Speed,
    allowed_nets,
    measured_speed,
    nominal_speed,
)
from paceline.recipes.survey import Survey, survey
from paceline.recipes.weights import Weights, find_weights
from paceline.train.choices import Choices, Situation

# The length of a run without `run.minutes`, at a typical speed.
_USUAL_MINUTES = 10.0
# The part of the time that is left for steps after evaluations and saves.
_FOR_STEPS = 0.93
# Time until the first step, after the choices, and from the last step to the end.
_AROUND_S = 5.0
_MOST_EPOCHS, _FEWEST_EPOCHS = 300, 2
# The same with pretrained weights.
_MOST_TUNED, _FEWEST_TUNED = 40, 4
# More than this many evaluations take time and tell little.
_EVALUATIONS = 20
# An average over fewer steps is no average.
_LEAST_AVERAGED = 3
# With fewer validation images than this, the last weights are better than those that look best.
_CHOOSES_BEST = 500
_MOST_MICRO_BATCH = 256


@dataclass(frozen=True)
class _Plan:
    """A network, its speed and the number of epochs in the time."""

    net: Net
    speed: Speed
    seconds: float
    epochs: int


class Auto:
    """Chooses settings for the user's own images."""

    def choose(self, situation: Situation) -> Choices:
        """Chooses settings.

        Args:
            situation: The data, the machine and the settings that the user has given.

        Raises:
            PacelineError: If the data or the time do not suffice.
        """
        facts = survey(situation)
        return _Choice(situation, facts).choices()


class _Choice:
    """The choices for one run."""

    def __init__(self, situation: Situation, facts: Survey) -> None:
        self._situation, self._facts = situation, facts
        self._most_epochs = _MOST_EPOCHS
        self._values: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}

    def choices(self) -> Choices:
        """Returns all choices with their reasons."""
        facts, situation = self._facts, self._situation
        color = "grayscale" if facts.channels == 1 else "color"
        self._reasons["recipe"] = (
            f"auto, for {plural(facts.images, 'image')} of {facts.classes:,} classes, {color}, "
            f"{facts.sizes}"
        )
        self._hold_out()
        weights = find_weights(situation, facts.channels)
        if weights is not None:
            self._most_epochs = _MOST_TUNED
        self._batch()
        plan = self._plan(weights)
        self._network(plan, weights)
        self._length(plan)
        self._optimizer(plan, weights)
        self._augmentation(plan)
        self._more_time(plan, weights)
        settles = () if weights is None else weights.settles
        return Choices(self._values, self._reasons, settles)

    def _set(self, why: str, reason: str, **values: Any) -> None:
        """Sets values, `section__key=value`, unless the user has given them.

        The reason is that of the first value; it is not shown if the user has given this one.
        """
        settings = [name.replace("__", ".") for name in values]
        chosen = {
            setting: value
            for setting, value in zip(settings, values.values(), strict=True)
            if setting not in self._situation.given
        }
        self._values |= chosen
        if reason and settings[0] in chosen:
            self._reasons[f"auto: {why}"] = reason

    def _value(self, setting: str) -> Any:
        """Returns the value of a setting: given, chosen, or the default."""
        if setting in self._situation.given:
            return self._situation.given[setting]
        return self._values.get(setting, self._situation.config.flat().get(setting))

    def _hold_out(self) -> None:
        images = self._facts.images
        if self._situation.validation:
            return
        share = 0.1 if images <= 20_000 else 2_000 / images
        self._set(
            "validation", f"{100 * share:.3g} % of the images, as there is no validation set",
            data__val_split=round(share, 4),
        )  # fmt: skip

    @property
    def _training_images(self) -> int:
        return max(1, round(self._facts.images * (1 - (self._value("data.val_split") or 0.0))))

    def _batch(self) -> None:
        images, ranks = self._training_images, self._situation.ranks
        batch = 32 if images < 5_000 else 64 if images < 20_000 else 128
        while batch > 8 and batch > images // 4:
            batch //= 2
        batch = max(1, round(batch / ranks)) * ranks
        given = self._situation.given
        self._rate_batch = batch
        if {"run.global_batch_size", "run.batch_size"} & given.keys():
            own = given.get("run.global_batch_size") or int(given["run.batch_size"]) * ranks
            if self._value("optim.scaling") == "auto":
                # The scaling rule changes the choices from this batch to the user's.
                self._set("", "", optim__known_good_batch=batch)
            else:
                self._rate_batch = own
            batch = own
        self._set(
            "batch", f"{batch}, for {-(-images // batch):,} updates per epoch",
            run__global_batch_size=batch,
        )  # fmt: skip

    def _plan(self, weights: Weights | None) -> _Plan:
        """Chooses the network and the number of epochs for the time."""
        situation, minutes = self._situation, self._situation.config.run.minutes
        seconds = 60 * (_USUAL_MINUTES if minutes is None else minutes)
        if minutes is not None:
            seconds -= situation.spent_s + _AROUND_S
        nets = self._nets(weights)
        if minutes is None:
            return self._longest([(net, nominal_speed(situation, net)) for net in nets], seconds)
        first = nets[0]
        speeds = {first: self._measure(first, weights)}
        unit = speeds[first].per_s * first.cost
        while True:
            # The others are estimated from the measured ones; the chosen one is measured, too.
            table = [(net, speeds.get(net) or Speed(unit / net.cost, "")) for net in nets]
            plan = self._longest(table, seconds)
            if plan.net in speeds:
                return self._checked(plan, minutes)
            speeds[plan.net] = self._measure(plan.net, weights)
            unit = speeds[plan.net].per_s * plan.net.cost

    def _nets(self, weights: Weights | None) -> list[Net]:
        """Returns the networks that suit the images, the device and the pretrained weights."""
        nets = allowed_nets(self._situation)
        if weights is not None:
            # Weights need little training, but as many pixels as possible.
            if weights.model:
                own = [net for net in nets if net.model == weights.model]
                nets = own or [
                    replace(net, model=weights.model) for net in nets if net.model == "resnet18"
                ]
            nets = [replace(net, visits=0, epochs=_FEWEST_TUNED) for net in nets]
        if "data.image_size" in self._situation.given:
            return nets
        median = self._facts.sides[1]
        # Up to a third of enlargement costs time but loses nothing.
        return [net for net in nets if net.pixels <= 1.34 * median] or nets[:1]

    def _longest(self, table: list[tuple[Net, Speed]], seconds: float) -> _Plan:
        """Returns the most expensive network that sees enough images in the time."""
        images, fixed = self._training_images, self._situation.given.get("run.epochs")
        plans: list[_Plan] = []
        for net, speed in table:
            epochs = int(speed.per_s * seconds * _FOR_STEPS / images)
            epochs = min(fixed or self._most_epochs, epochs)
            if not plans or epochs >= max(net.visits / images, net.epochs):
                epochs = fixed or max(_FEWEST_EPOCHS, epochs)
                plans.append(_Plan(net, speed, images / speed.per_s, epochs))
        return plans[-1]

    def _measure(self, net: Net, weights: Weights | None) -> Speed:
        values = {**self._values, **net.settings, "data.eval_resize": 0}
        values |= {"data.channels": self._channels(weights)}
        values |= {} if weights is None else weights.settings
        values = {k: v for k, v in values.items() if k not in self._situation.given}
        values["run.pretrained"] = ""
        return measured_speed(self._situation, values, self._facts.classes)

    def _checked(self, plan: _Plan, minutes: float) -> _Plan:
        """Raises ConfigError if not even two epochs of the network fit into the time."""
        overhead = self._situation.spent_s + _AROUND_S
        needed = (_FEWEST_EPOCHS * plan.seconds / _FOR_STEPS + overhead) / 60
        if needed > minutes:
            raise ConfigError(
                "run.minutes", minutes,
                f"{_FEWEST_EPOCHS} epochs of {plan.net.text} on {self._training_images:,} images take "
                f"{format_duration(60 * needed)} here",
                f"give --minutes {needed * 1.1:.2g} or more, or fewer images",
            )  # fmt: skip
        return plan

    def _channels(self, weights: Weights | None) -> int:
        return self._facts.channels if weights is None else weights.channels

    def _network(self, plan: _Plan, weights: Weights | None) -> None:
        net, minutes = plan.net, self._situation.config.run.minutes
        time = f"in {minutes:g} min" if minutes else f"in about {_USUAL_MINUTES:g} min"
        speed = f"{plan.speed.per_s:,.0f} images/s ({plan.speed.origin})"
        why = f"the largest network that sees enough images {time} at {speed}"
        if weights is not None:
            self._reasons["auto: pretrained"] = weights.reason
            for setting, value in weights.settings.items():
                if setting not in self._situation.given or setting in weights.settles:
                    self._values[setting] = value
        if not self._situation.own_model:
            self._set("model", f"{net.model}: {why}", model__name=net.model)
            if "model.name" in self._values or net.model == self._value("model.name"):
                stem = net.settings.get("model.stem", "auto")
                self._set("", "", model__stem=stem)
        self._set(
            "image size", f"{net.pixels}, of images with {self._facts.sizes}{self._size_hint()}",
            data__image_size=net.pixels,
        )  # fmt: skip
        self._set("", "", data__channels=self._channels(weights))
        if self._facts.square and self._facts.sides[2] <= 1.15 * self._value("data.image_size"):
            self._set("", "", data__eval_resize=0)

    def _size_hint(self) -> str:
        if self._facts.longest < 2_000:
            return ""
        hint = "`paceline pack SRC DST --short-side 320` makes reading faster"
        return f" (up to {self._facts.longest:,}: {hint})"

    def _length(self, plan: _Plan) -> None:
        epochs, minutes = plan.epochs, self._situation.config.run.minutes
        about = format_duration(epochs * plan.seconds / _FOR_STEPS)
        text = f"{epochs}, about {about} with evaluations"
        if minutes is not None and "run.epochs" not in self._situation.given:
            text += "; corrected after the first epoch"
        every = max(1, round(epochs / _EVALUATIONS))
        average = round(min(0.04 * epochs, 5.0), 2)
        steps = average * self._training_images / self._value("run.global_batch_size")
        self._set("epochs", text, run__epochs=epochs)
        self._set(
            "", "", run__eval_interval_epochs=every, checkpoint__interval_epochs=every,
            run__average_epochs=average if steps >= _LEAST_AVERAGED else 0.0,
        )  # fmt: skip
        held_out = self._facts.images - self._training_images
        if not self._situation.validation and held_out < _CHOOSES_BEST:
            self._set(
                "best checkpoint", f"none: {held_out} validation images are too few to choose by",
                checkpoint__keep_best=False,
            )  # fmt: skip

    def _optimizer(self, plan: _Plan, weights: Weights | None) -> None:
        given = self._situation.given
        warmup = round(min(5.0, 0.1 * plan.epochs), 2)
        self._set("", "", optim__warmup_epochs=warmup, optim__schedule="cosine", run__smoothing=0.1)
        if "optim.name" in given:
            if "optim.lr" not in given:
                self._reasons["auto: rate"] = f"the usual one of {given['optim.name']}"
            return
        rate = 0.05 if plan.net.model.startswith("resnet18") else 0.1
        reason = "usual for this network and batch"
        if weights is not None:
            rate, reason = 0.01, "a tenth of the rate without pretrained weights, or less"
        # The rate follows the square root of the batch.
        rate = round(rate * (self._rate_batch / 32) ** 0.5, 4)
        schedule = self._value("optim.schedule")
        self._set(
            "rate", f"{rate:g} with SGD and schedule {schedule}: {reason}",
            optim__lr=rate, optim__name="sgd", optim__nesterov=True, optim__weight_decay=5e-4,
        )  # fmt: skip

    def _augmentation(self, plan: _Plan) -> None:
        pixels = self._value("data.image_size")
        if self._facts.channels == 1 and self._facts.sides[1] <= 40:
            self._set(
                "augmentation", "shifts by an eighth, for small grayscale images",
                data__augment="pad_crop", data__crop_padding=max(1, pixels // 8),
            )  # fmt: skip
            return
        self._set(
            "augmentation", "crops of at least a quarter of the image, and mirror images",
            data__augment="random_resized_crop", data__crop_scale=[0.25, 1.0], data__flip=True,
        )  # fmt: skip

    def _more_time(self, plan: _Plan, weights: Weights | None) -> None:
        minutes = self._situation.config.run.minutes or _USUAL_MINUTES
        if "run.epochs" in self._situation.given:
            return
        unit = plan.speed.per_s * plan.net.cost
        table = [(net, Speed(unit / net.cost, "")) for net in self._nets(weights)]
        later = self._longest(table, 4 * 60 * minutes)
        if later.net == plan.net and later.epochs <= plan.epochs:
            text = "would change nothing"
        else:
            text = f"would use {later.net.text} for {later.epochs} epochs"
        self._reasons["auto: more time"] = f"--minutes {4 * minutes:g} {text}"


RECIPE = Auto()
