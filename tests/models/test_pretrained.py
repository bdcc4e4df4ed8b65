"""Weights from files: what fits is taken whole, what does not changes nothing."""

import argparse
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.models import alexnet
from paceline.models.alexnet import NORM_NAMES, AlexNet
from paceline.models.pretrained import load_pretrained
from paceline.models.resnet import RESNET_LAYOUTS, ResNet, SmallResNet


def trained(seed=0, **options):
    """A model whose every tensor differs from a fresh one's."""
    torch.manual_seed(seed)
    return scrambled(SmallResNet(**options))


def scrambled(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
        else:
            tensor.fill_(17)
    return model


def fresh(**options):
    torch.manual_seed(99)
    return SmallResNet(**options)


def copy_of(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


def refused(model, path):
    """Loads, expects one line of complaint and an untouched model; returns the line."""
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
def test_round_trip_through_wrappings_and_prefixes(tmp_path, wrapper, prefix):
    source = trained()
    state = {prefix + key: value for key, value in source.state_dict().items()}
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "w.pth")
    model = fresh()
    assert load_pretrained(model, tmp_path / "w.pth") == []
    assert same(copy_of(source), copy_of(model))


def test_two_wrappers_and_a_namespace_as_reference_trainers_write_them(tmp_path):
    source = trained()
    inner = {"state_dict": source.state_dict()}
    args = argparse.Namespace(lr=0.1, model="x")
    torch.save({"model": inner, "args": args}, tmp_path / "w.pth.tar")
    model = fresh()
    assert load_pretrained(model, tmp_path / "w.pth.tar") == []
    assert same(copy_of(source), copy_of(model))


def test_torchs_old_file_format(tmp_path):
    source = trained()
    path = tmp_path / "w.pth"
    torch.save(source.state_dict(), path, _use_new_zipfile_serialization=False)
    model = fresh()
    load_pretrained(model, path)
    assert same(copy_of(source), copy_of(model))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors(tmp_path, prefix):
    source = trained()
    tensors = {prefix + key: value for key, value in source.state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    model = fresh()
    assert load_pretrained(model, tmp_path / "w.safetensors") == []
    assert same(copy_of(source), copy_of(model))


def test_a_large_resnet_and_back(tmp_path):
    first = scrambled(ResNet(*RESNET_LAYOUTS["resnet18"], num_classes=10))
    torch.save(first.state_dict(), tmp_path / "w.pth")
    second = ResNet(*RESNET_LAYOUTS["resnet18"], num_classes=10)
    load_pretrained(second, tmp_path / "w.pth")
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(first.eval()(x), second.eval()(x))


def test_another_number_of_classes_keeps_a_fresh_head_and_says_so(tmp_path):
    source = trained(num_classes=1000)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = fresh(num_classes=10)
    head = copy_of(model.fc)
    (note,) = load_pretrained(model, tmp_path / "w.pth")
    assert "fc" in note
    assert "1000 classes" in note
    assert "10" in note.replace("1000", "")
    assert same(head, copy_of(model.fc))
    assert same(copy_of(source.layer3), copy_of(model.layer3))


def test_a_head_of_other_width_is_a_misfit_not_another_head(tmp_path):
    state = trained(num_classes=1000).state_dict()
    state["fc.weight"] = torch.ones(1000, 64)
    torch.save(state, tmp_path / "w.pth")
    line = refused(fresh(num_classes=10), tmp_path / "w.pth")
    assert "fc.weight [1000, 64] for [10, 128]" in line


def test_a_missing_head_is_missing(tmp_path):
    state = {k: v for k, v in trained().state_dict().items() if not k.startswith("fc.")}
    torch.save(state, tmp_path / "w.pth")
    assert "2 missing (fc.weight, fc.bias)" in refused(fresh(), tmp_path / "w.pth")


def test_batch_counts_may_be_absent_and_keep_their_value(tmp_path):
    source = trained()
    state = {k: v for k, v in source.state_dict().items() if "num_batches_tracked" not in k}
    torch.save(state, tmp_path / "w.pth")
    model = fresh()
    assert load_pretrained(model, tmp_path / "w.pth") == []
    assert torch.equal(model.bn1.running_mean, source.bn1.running_mean)
    assert model.bn1.num_batches_tracked.item() == 0


@pytest.mark.parametrize("part", ["running_mean", "running_var", "weight", "bias"])
def test_nothing_else_of_a_batch_norm_may_be_absent(tmp_path, part):
    state = trained().state_dict()
    del state[f"bn1.{part}"]
    torch.save(state, tmp_path / "w.pth")
    assert f"1 missing (bn1.{part})" in refused(fresh(), tmp_path / "w.pth")


def test_a_file_of_another_model_names_counts_and_first_keys(tmp_path):
    torch.save(ResNet(*RESNET_LAYOUTS["resnet18"]).state_dict(), tmp_path / "w.pth")
    line = refused(fresh(), tmp_path / "w.pth")
    assert "SmallResNet of" in line
    assert "unexpected (layer1.1.conv1.weight" in line
    assert "of another shape (conv1.weight [64, 3, 7, 7] for [16, 1, 3, 3]" in line
    assert " more)" in line


def test_other_channels_are_a_misfit(tmp_path):
    torch.save(trained(in_channels=3).state_dict(), tmp_path / "w.pth")
    line = refused(fresh(in_channels=1), tmp_path / "w.pth")
    assert "1 of another shape (conv1.weight [16, 3, 3, 3] for [16, 1, 3, 3])" in line


def test_whole_numbers_are_no_weights(tmp_path):
    state = trained().state_dict()
    state["conv1.weight"] = state["conv1.weight"].to(torch.int8)
    torch.save(state, tmp_path / "w.pth")
    assert "conv1.weight [16, 1, 3, 3] int8" in refused(fresh(), tmp_path / "w.pth")


def test_half_precision_files_are_widened_and_noted(tmp_path):
    source = trained()
    torch.save({k: v.half() if v.is_floating_point() else v for k, v in source.state_dict().items()},
               tmp_path / "w.pth")  # fmt: skip
    model = fresh()
    (note,) = load_pretrained(model, tmp_path / "w.pth")
    assert "float16" in note
    assert model.conv1.weight.dtype == torch.float32
    torch.testing.assert_close(model.conv1.weight, source.conv1.weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"no weights here\n", bytes(range(256)) * 9, b"\x80\x02."]
)
def test_files_that_are_no_weights(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    line = refused(fresh(), tmp_path / name)
    assert "cannot be read as weights: it is " in line
    assert ("it is empty" in line) is (content == b"")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_files(tmp_path, name, share):
    path = tmp_path / name
    state = trained().state_dict()
    save_file(state, path) if name.endswith("safetensors") else torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "cannot be read as weights" in refused(fresh(), path)


class Foreign:
    """A class that torch's weights-only reader must not build."""


@pytest.mark.parametrize("content", [Foreign(), {"state_dict": {}, "hook": Foreign()}])
def test_files_with_code_are_refused_unread(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    line = refused(fresh(), tmp_path / "w.pth")
    assert "besides tensors it holds objects of " in line
    assert "Foreign" in line
    assert "trust" not in line


@pytest.mark.parametrize(
    "content", [{}, [torch.ones(1)], torch.ones(2), {"epoch": 3}, {"model": {"lr": 0.1}}, {1: 2}]
)
def test_torch_files_without_weights(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    assert "holds no weights" in refused(fresh(), tmp_path / "w.pth")


def test_a_missing_file_and_a_directory(tmp_path):
    assert "is not a file" in refused(fresh(), tmp_path / "absent.pth")
    assert "is not a file" in refused(fresh(), tmp_path)


def test_a_model_without_a_head(tmp_path):
    source = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3)))
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3)))
    assert load_pretrained(model, tmp_path / "w.pth") == []
    assert torch.equal(model.conv.weight, source.conv.weight)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)


def test_a_plain_alexnet_loads_into_one_with_batch_norm(tmp_path, narrow):
    source = scrambled(AlexNet(num_classes=5))
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = AlexNet(num_classes=5, norms=NORM_NAMES)
    (note,) = load_pretrained(model, tmp_path / "w.pth")
    assert "6 batch norms start fresh" in note
    assert torch.equal(model.features.get_submodule("10").weight, source.features[10].weight)


def test_a_batch_norm_that_is_half_there_is_missing(tmp_path, narrow):
    state = AlexNet(num_classes=5, norms=["bn0", "bn3"]).state_dict()
    torch.save(state, tmp_path / "w.pth")
    line = refused(AlexNet(num_classes=5, norms=["bn0", "bn3", "bn_pool5"]), tmp_path / "w.pth")
    assert "4 missing (features.bn_pool5.weight" in line


def test_a_plain_alexnet_does_not_drop_batch_norms(tmp_path, narrow):
    torch.save(AlexNet(num_classes=5, norms=["bn0"]).state_dict(), tmp_path / "w.pth")
    assert "5 unexpected (features.bn0.weight" in refused(
        AlexNet(num_classes=5), tmp_path / "w.pth"
    )


def test_a_checkpoint_of_ours_is_pointed_to_export(tmp_path):
    path = tmp_path / "step-00000001.pt"
    torch.save({"format": "paceline-checkpoint", "model": {"a": torch.zeros(1)}}, path)
    with pytest.raises(CheckpointError, match="is a checkpoint of a run.*paceline export"):
        load_pretrained(nn.Linear(1, 1), path)


def test_files_of_old_torch_load_without_a_word(tmp_path):
    """Warnings are errors here: torch's own code for its old format uses what it deprecates."""
    state = nn.Linear(3, 2).state_dict()
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert (
        load_pretrained(nn.Sequential(OrderedDict(a=nn.Linear(3, 2)))[0], tmp_path / "old.pt") == []
    )


def test_a_length_beyond_the_memory_is_damage(tmp_path, monkeypatch):
    def ask_for_all(*_, **__):
        raise MemoryError

    (tmp_path / "w.pt").write_bytes(b"x")
    monkeypatch.setattr(torch, "load", ask_for_all)
    with pytest.raises(CheckpointError, match="more memory than there is"):
        load_pretrained(nn.Linear(3, 2), tmp_path / "w.pt")
