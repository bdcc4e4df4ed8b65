"""Runs of models that are not ours: they train, resume and evaluate alike, or fail in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from models.user_net import UserNet, loss_of_both, make_net
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.events import Event, StartEvent, StepEvent
from paceline.train import Checkpoint, evaluate_file
from paceline.train.callbacks import Callback, RunControl
from paceline.train.components import Components
from ranks import run_ranks
from small_runs import run_small
from train.runs import EVERY_STEP, AtStep, newest
from train.runs import watched as train

NAMED: dict[str, Any] = {"model__name": "models.user_net:make_net"}


def chosen(events: list[Event]) -> dict[str, str]:
    (start,) = [event for event in events if isinstance(event, StartEvent)]
    return start.chosen


def several() -> Components:
    """The user's network with all of its outputs, and a loss of two of them."""
    torch.manual_seed(4)
    return Components(model=UserNet(4, several=True), loss=loss_of_both)


def test_a_users_module_trains_and_resumes_bit_identically(tmp_path: Path) -> None:
    whole, events = train(tmp_path / "whole", several())
    assert "UserNet (given in Python)" in chosen(events)["model"]
    assert "model notes" not in chosen(events)
    assert "plain model" in chosen(events)["speed"]
    train(tmp_path / "cut", several(), AtStep(3))
    rest, _ = train(tmp_path / "cut", several(), run__resume="auto")
    assert rest.summary["resumed_at_steps"] == [3]
    for name in ("weights_sha256", "top1", "val_loss"):
        assert rest.summary[name] == whole.summary[name]
    with pytest.raises(PacelineError, match="does not fit .*resnet_tiny .* Python object"):
        evaluate_file(newest(tmp_path / "whole"), {"run.device": "cpu"}, 16)
    weights = load_file(tmp_path / "whole/weights.safetensors")
    assert torch.equal(weights["encode.weight"], weights["encode_again.weight"])
    assert not torch.equal(weights["head.weight"], several().model.head.weight)  # type: ignore[union-attr]


def test_a_named_factory_trains_and_is_evaluated_only_if_trusted(tmp_path: Path) -> None:
    outcome, events = train(tmp_path / "run", **NAMED)
    assert chosen(events)["model"].startswith("models.user_net:make_net, ")
    path = newest(tmp_path / "run")
    with pytest.raises(ConfigError, match="--trust"):
        evaluate_file(path, {"run.device": "cpu"}, 16)
    result, _, _ = evaluate_file(path, {"run.device": "cpu"}, 16, trust=True)
    assert not isinstance(result, int)
    assert result.top1 == outcome.summary["top1"]


def test_frozen_layers_stay_and_the_run_resumes_bit_identically(
    finished: Path, tmp_path: Path
) -> None:
    frozen: dict[str, Any] = {
        "model__freeze": ["conv1.*", "bn1", "layer1.*"],
        "run__pretrained": str(finished / "weights.safetensors"),
    }
    whole, events = train(tmp_path / "run", **frozen, **EVERY_STEP)
    assert "of them frozen" in chosen(events)["model"]
    assert chosen(events)["pretrained"] == "74 of 74 tensors from weights.safetensors"
    start, end = (load_file(f / "weights.safetensors") for f in (finished, tmp_path / "run"))
    kept = {name for name in start if torch.equal(start[name], end[name])}
    expected = {name for name in start if name.startswith(("conv1.", "bn1.", "layer1."))}
    assert kept == expected, "their running statistics included"
    middle = str(tmp_path / "run/checkpoints/step-00000003.pt")
    rest = run_small(tmp_path / "rest", run__resume=middle, **frozen).summary
    assert rest["weights_sha256"] == whole.summary["weights_sha256"]
    with pytest.raises(PacelineError, match="model.freeze"):
        run_small(tmp_path / "other", run__resume=middle, model__freeze=["conv1"])


class Linear(nn.Module):
    """The smallest network; its forms misbehave in one way each."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(12 * 12, num_classes)

    def forward(self, images: Tensor) -> Any:
        return self.head(images.flatten(1))


class Wide(Linear):
    def __init__(self) -> None:
        super().__init__(9)


class Pair(Linear):
    def forward(self, images: Tensor) -> Any:
        return super().forward(images), images


class PairInTraining(Linear):
    aux_logits = True

    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        return (logits, logits) if self.training else logits


class NoLogitsInEvaluation(Linear):
    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        return logits if self.training else {"classes": logits.argmax(1)}


class ChangesWeights(Linear):
    def forward(self, images: Tensor) -> Any:
        self.head.weight.data.mul_(0.9)
        return super().forward(images)


class FixedSize(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32 * 32, 4)


class FailsInBackward(Linear):
    def forward(self, images: Tensor) -> Any:
        logits: Tensor = super().forward(images)
        if logits.requires_grad:
            logits.register_hook(_fail)
        return logits


def _fail(gradient: Tensor) -> Tensor:
    raise LookupError("no gradient today\nand more")


class HoldsOther(Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to keep."""


class HoldsExpanded(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(5))


class HoldsSparse(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Wide, "4 × 9"),
        (Pair, "a tuple of 2"),
        (PairInTraining, "aux_logits"),
        (NoLogitsInEvaluation, "a dict of 1"),
        (ChangesWeights, "head.weight"),
        (FixedSize, "data.image_size"),
        (FailsInBackward, "LookupError"),
        (HoldsOther, "_extra_state"),
        (HoldsExpanded, "scale"),
        (HoldsSparse, "graph"),
        (lambda num_classes: 3, "int"),
        (lambda: nn.Linear(3, 4, device="meta"), "meta"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_before_the_first_step(
    tmp_path: Path, model: Callable[..., Any], named: str
) -> None:
    given = model() if isinstance(model, type) else model
    with pytest.raises(PacelineError, match=named) as caught:
        train(tmp_path / "run", Components(model=given))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Counts(Linear):
    """Keeps state in a buffer that is not batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Any:
        if self.training:
            self.seen += 1
        return super().forward(images) / (1 + 0.01 * self.seen)


class Forgetful(Linear):
    """Keeps state where nobody sees it."""

    calls = 0

    def forward(self, images: Tensor) -> Any:
        self.calls += 1
        return super().forward(images) / self.calls


class OneInADictionary(Linear):
    def forward(self, images: Tensor) -> Any:
        return {"logits": super().forward(images), "loss": None}


class Doubles(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (Counts, "keeps state between batches in seen"),
        (Forgetful, "other outputs for the same batch"),
        (OneInADictionary, ""),
        (Doubles, ""),
    ],
)
def test_models_that_can_be_trained_with_limits(
    tmp_path: Path, model: type[Linear], note: str
) -> None:
    torch.manual_seed(0)
    given = model()
    twin = copy.deepcopy(given)
    outcome, events = train(tmp_path / "run", Components(model=given), run__epochs=1)
    assert note in chosen(events).get("model notes", "")
    assert outcome.summary["top1"] is not None
    assert not torch.equal(given.head.weight, twin.head.weight.float()), "trained as it is"
    if isinstance(given, Counts):
        # 56 samples in batches of 16; the check before the first step left no trace.
        assert given.seen == 4
        assert Checkpoint.read(newest(tmp_path / "run")).model["seen"] == 4


class FailsLater(Linear):
    def forward(self, images: Tensor) -> Any:
        if len(images) not in (4, 16):
            raise IndexError("a batch of another size")
        return super().forward(images)


def test_a_model_that_fails_in_the_middle_is_one_line(tmp_path: Path) -> None:
    words = "failed at step 4 on 16 images: IndexError: a batch of another size"
    with pytest.raises(PacelineError, match=words):
        train(tmp_path / "run", Components(model=FailsLater()), run__epochs=1)


class AfterTwoSteps(Callback):
    """Does what a model's own forward could do as well."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        if event.step == 2:
            self._change(run.model)


def new_layer(model: Any) -> None:
    model.head = nn.Linear(12 * 12, 4)


def new_memory(model: Any) -> None:
    model.head.weight.data = model.head.weight.data.clone()


def more_layers(model: Any) -> None:
    model.second = nn.Linear(4, 4)


def thaw(model: Any) -> None:
    model.head.bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (new_layer, "head.weight was "),
        (new_memory, "head.weight was "),
        (more_layers, "second.weight was "),
        (thaw, "head.bias was "),
    ],
)
def test_parameters_that_change_after_the_start_are_noticed(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    model = Linear()
    model.head.bias.requires_grad_(change is not thaw)
    given = Components(model=model, callbacks=(AfterTwoSteps(change),))
    with pytest.raises(RunError, match=words):
        train(tmp_path / "run", given)
    # The steps before are kept.
    assert Checkpoint.read(newest(tmp_path / "run")).step == 2


class LazyHead(Linear):
    """Replaces its layer in a forward pass that trains: the dry one before the first step."""

    lazy = True

    def forward(self, images: Tensor) -> Any:
        if self.lazy and len(images) == 16:
            self.lazy = False
            new_layer(self)
        return super().forward(images)


def test_parameters_replaced_before_the_first_step_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="head.weight was "):
        train(tmp_path / "run", Components(model=LazyHead()))


def _on_two_ranks(rank: int, folder: str, what: str) -> tuple[str, str]:
    """The error, or notes and weights."""
    torch.manual_seed(rank)  # each rank draws weights of its own
    models: dict[str, Any] = {
        "module": UserNet(4, several=False),
        "state": Counts(),
        "factory": lambda num_classes: make_net(num_classes, 1) if rank == 0 else 1 / 0,
    }
    values = {"run__epochs": 1, "comm__fusion_mib": 0.0}
    try:
        outcome, events = train(Path(folder) / what, Components(model=models[what]), **values)
    except PacelineError as error:
        return "", str(error)
    found = chosen(events)["model notes"] if rank == 0 else ""
    return found, outcome.summary["weights_sha256"]


def test_two_ranks_share_weights_and_fail_alike(tmp_path: Path) -> None:
    (note, weights), (_, others) = run_ranks(2, _on_two_ranks, str(tmp_path), "module")
    assert note == "initial weights of rank 0"
    assert weights == others
    for what, words in (
        ("factory", "rank 1: model.name = "),
        ("state", "rank 0: the model keeps state between batches in seen"),
    ):
        (_, first), (_, second) = run_ranks(2, _on_two_ranks, str(tmp_path), what)
        assert first == second
        assert first.startswith(words)


def test_the_loss_sees_all_outputs_and_evaluation_the_logits(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        seen.append(set(outputs))
        return F.cross_entropy(outputs["logits"], targets, reduction="none")

    outcome, _ = train(tmp_path / "run", replace(several(), loss=loss), run__epochs=1)
    assert seen[0] == {"features", "logits", "back"}
    assert outcome.summary["top1"] is not None
    with pytest.raises(RunError, match="a dict of 3 tensors"):
        train(tmp_path / "other", replace(several(), loss=None), run__epochs=1)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrized_weights_train_in_half_precision(tmp_path: Path, name: str) -> None:
    parametrized = getattr(nn.utils.parametrizations, name)
    net = nn.Sequential(
        parametrized(nn.Conv2d(1, 8, 3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        parametrized(nn.Linear(8, 4)), nn.Linear(4, 4),
    )  # fmt: skip
    before = copy.deepcopy(net.state_dict())
    outcome, _ = train(tmp_path, Components(model=net), precision__amp_dtype="bf16", run__epochs=1)
    assert outcome.summary["steps"] > 0
    after = net.state_dict()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert not any(torch.equal(after[key], before[key]) for key in before if "original" in key)
