"""Weights from files: a matching file is loaded, another file changes nothing."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.models import SmallResNet, load_pretrained
from paceline.models.resnet import RESNET_LAYOUTS, ResNet

State = dict[str, Tensor]


def trained(model: nn.Module | None = None, **options: Any) -> nn.Module:
    """A model whose tensors all differ from a new one's."""
    torch.manual_seed(0)
    model = SmallResNet(**options) if model is None else model
    for tensor in model.state_dict().values():
        tensor.uniform_(0.5, 1.5) if tensor.is_floating_point() else tensor.fill_(17)
    return model


def fresh(**options: Any) -> SmallResNet:
    torch.manual_seed(99)
    return SmallResNet(**options)


def copy_of(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


def saved(content: object, folder: Path, name: str = "w.pth") -> Path:
    if name.endswith(".safetensors"):
        save_file(content, folder / name)  # type: ignore[arg-type]
    else:
        torch.save(content, folder / name)
    return folder / name


def refused(model: nn.Module, path: Path) -> str:
    """Expects an error of one line and an unchanged model; returns the line."""
    before = copy_of(model)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(model, path)
    assert same(before, copy_of(model))
    line = str(caught.value)
    assert path.name in line
    assert "\n" not in line
    assert caught.value.remedy
    return line


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state", "weights"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_and_prefixes(tmp_path: Path, wrapper: str | None, prefix: str) -> None:
    source, model = trained(), fresh()
    state = {prefix + key: value for key, value in source.state_dict().items()}
    path = saved({wrapper: state, "epoch": 3} if wrapper else state, tmp_path)
    assert load_pretrained(model, path) == [all_of(model, path)]
    assert same(copy_of(source), copy_of(model))


def all_of(model: nn.Module, path: Path) -> str:
    """The only note on a file that has everything."""
    count = len(model.state_dict())
    return f"{count} of {count} tensors from {path.name}"


@pytest.mark.parametrize("prefix", ["model.", "net.", "module.model.", "timm_model."])
def test_the_name_of_the_network_in_another_program(tmp_path: Path, prefix: str) -> None:
    source, model = trained(), fresh()
    state = {prefix + key: value for key, value in source.state_dict().items()}
    # As Lightning writes it, with its own entries and those of a metric.
    content = {"state_dict": {**state, "accuracy.tp": torch.ones(3)}, "epoch": 1, "loops": {}}
    _, removed = load_pretrained(model, saved(content, tmp_path, "last.ckpt"))
    assert repr(prefix) in removed
    assert same(copy_of(source), copy_of(model))


def test_counters_of_another_integer_format_are_taken(tmp_path: Path) -> None:
    state = trained().state_dict()
    state = {k: v if v.is_floating_point() else v.to(torch.int32) + 7 for k, v in state.items()}
    model = fresh()
    load_pretrained(model, saved(state, tmp_path))
    assert model.get_buffer("bn1.num_batches_tracked").dtype == torch.int64
    assert model.get_buffer("bn1.num_batches_tracked") >= 7


def test_timm_s_average_is_preferred_and_noted(tmp_path: Path) -> None:
    source, model = trained(), fresh()
    content = {"state_dict": fresh().state_dict(), "state_dict_ema": source.state_dict()}
    notes = load_pretrained(model, saved(content, tmp_path))
    assert notes[1:] == ["of state_dict_ema"]
    assert same(copy_of(source), copy_of(model))


class TwoHeads(nn.Module):
    """A distilled transformer of timm, which names its heads; the last linear layer is none."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head, self.head_dist = nn.Linear(4, classes), nn.Linear(4, classes)
        self.last = nn.Linear(4, 4)

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist


def test_heads_that_the_model_names(tmp_path: Path) -> None:
    source, model = trained(TwoHeads(1000)), TwoHeads(10)
    before = copy_of(model.head)
    counted, note = load_pretrained(model, saved(source.state_dict(), tmp_path))
    assert counted.startswith("2 of 6 tensors")
    assert "head and head_dist" in note
    assert "1000 classes, this model 10" in note
    assert same(before, copy_of(model.head))
    assert torch.equal(model.last.weight, source.get_parameter("last.weight"))


def test_formats_of_other_programs(tmp_path: Path) -> None:
    source = trained()
    state = source.state_dict()
    old = tmp_path / "old.pth"
    torch.save(state, old, _use_new_zipfile_serialization=False)
    namespace = argparse.Namespace(lr=0.1, model="x")  # as torchvision's reference scripts
    prefixed = {f"module.{key}": value for key, value in state.items()}
    for path in (
        old,
        saved({"model": {"state_dict": state}, "args": namespace}, tmp_path, "w.pth.tar"),
        saved(state, tmp_path, "w.safetensors"),
        saved(prefixed, tmp_path, "p.safetensors"),
    ):
        model = fresh()
        assert load_pretrained(model, path) == [all_of(model, path)]
        assert same(copy_of(source), copy_of(model))
    plain = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3)))
    assert len(load_pretrained(plain, saved(plain.state_dict(), tmp_path))) == 1, "without a head"


def test_another_number_of_classes_keeps_a_new_head(tmp_path: Path) -> None:
    source, model = trained(num_classes=1000), fresh(num_classes=10)
    head = copy_of(model.fc)
    path = saved(source.state_dict(), tmp_path)
    (_, note) = load_pretrained(model, path)
    assert "fc" in note
    assert "1000 classes" in note
    assert same(head, copy_of(model.fc))
    assert torch.equal(model.bn1.weight, source.get_parameter("bn1.weight"))
    wide = source.state_dict() | {"fc.weight": torch.ones(1000, 64)}
    line = refused(fresh(num_classes=10), saved(wide, tmp_path))
    assert "fc.weight [1000, 64] for [10, 128]" in line


def test_batch_counts_may_be_missing_and_nothing_else(tmp_path: Path) -> None:
    source, model = trained(), fresh()
    state = copy_of(source)
    counted = {k: v for k, v in state.items() if "num_batches_tracked" not in k}
    assert len(load_pretrained(model, saved(counted, tmp_path))) == 1
    assert torch.equal(model.bn1.weight, state["bn1.weight"])
    assert model.get_buffer("bn1.num_batches_tracked").item() == 0
    for part in ("running_mean", "running_var", "weight", "bias"):
        rest = {k: v for k, v in state.items() if k != f"bn1.{part}"}
        assert f"1 missing (bn1.{part})" in refused(fresh(), saved(rest, tmp_path))
    headless = {k: v for k, v in state.items() if not k.startswith("fc.")}
    assert "2 missing (fc.weight, fc.bias)" in refused(fresh(), saved(headless, tmp_path))


def test_files_of_other_models(tmp_path: Path) -> None:
    other = ResNet(*RESNET_LAYOUTS["resnet18"]).state_dict()
    line = refused(fresh(), saved(other, tmp_path))
    assert "SmallResNet of" in line
    assert "unexpected (layer1.1.conv1.weight" in line
    assert "of another shape (conv1.weight [64, 3, 7, 7] for [16, 1, 3, 3]" in line
    assert " more)" in line
    line = refused(fresh(), saved(trained(in_channels=3).state_dict(), tmp_path))
    assert "1 of another shape (conv1.weight [16, 3, 3, 3] for [16, 1, 3, 3])" in line
    state = copy_of(trained())
    state["conv1.weight"] = state["conv1.weight"].to(torch.int8)
    assert "conv1.weight [16, 1, 3, 3] int8" in refused(fresh(), saved(state, tmp_path))


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_damaged_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(trained().state_dict(), tmp_path, name)
    whole = path.read_bytes()
    parts = [whole[: int(len(whole) * share)] for share in (0.1, 0.5, 0.99)]
    for content in (b"", b"no weights\n", bytes(range(256)) * 9, b"\x80\x02.", *parts):
        path.write_bytes(content)
        line = refused(fresh(), path)
        assert "cannot be read as weights" in line
        assert ("it is empty" in line) is (content == b"")

    def ask_for_all(*_: Any, **__: Any) -> None:
        raise MemoryError

    sound = saved(trained().state_dict(), tmp_path, "w.pt")
    monkeypatch.setattr(torch, "load", ask_for_all)
    assert "more memory" in refused(fresh(), sound)
    for missing in (tmp_path / "absent.pth", tmp_path):
        assert "is not a file" in refused(fresh(), missing)


class Foreign:
    """A class that torch's weights-only reader must not create."""


@pytest.mark.parametrize("content", [Foreign(), {"state_dict": {}, "hook": Foreign()}])
def test_files_with_code_are_refused_unread(tmp_path: Path, content: object) -> None:
    line = refused(fresh(), saved(content, tmp_path))
    assert "Foreign" in line
    assert "trust" not in line


@pytest.mark.parametrize(
    "content", [{}, [torch.ones(1)], torch.ones(2), {"epoch": 3}, {"model": {"lr": 0.1}}, {1: 2}]
)
def test_files_without_weights(tmp_path: Path, content: object) -> None:
    assert "contains no weights" in refused(fresh(), saved(content, tmp_path))
    ours = {"format": "paceline-checkpoint", "model": {"a": torch.zeros(1)}}
    assert "paceline export" in refused(fresh(), saved(ours, tmp_path, "step-00000001.pt"))
