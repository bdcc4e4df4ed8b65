"""The choice of an implementation: by time, once, and from a file of earlier choices."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.accel import cudnn_graphs, implementation_choice
from paceline.accel.fused_convolutions import _fastest
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices, building

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FILE = implementation_choice._file


class Model:
    """The choices of one model, and of the next one after `begin`."""

    choices: Choices


def begin(mode: str, device: torch.device) -> None:
    Model.choices = Choices.begin(mode, device)


class Forms:
    """Forms that take the given times; a string or an error is raised."""

    def __init__(self, **times: float | str | Exception) -> None:
        self.times, self.calls = times, 0

    def __call__(self) -> dict[str, Callable[[], object]]:
        def form(name: str) -> Callable[[], object]:
            def call() -> float:
                self.calls += 1
                found = self.times[name]
                if isinstance(found, str):
                    raise RuntimeError(found)
                if isinstance(found, Exception):
                    raise found
                return found

            return call

        return {name: form(name) for name in self.times}


@pytest.fixture(autouse=True)
def _on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        implementation_choice, "_file", lambda _, mode, *more: tmp_path / f"{mode}.json"
    )
    monkeypatch.setattr(implementation_choice, "_milliseconds", lambda call: call())
    monkeypatch.setattr(implementation_choice, "_build", lambda calls: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    begin("auto", GPU)


def test_what_follows_a_form_counts() -> None:
    """A forward form that stores less may leave more to backward."""

    def later(result: object) -> float:
        return result + (5.0 if result == 1.0 else 0.5)

    assert Model.choices.choose("forward x", Forms(a=1.0, separate=2.0)(), GPU, later) == SEPARATE
    assert Model.choices.times["forward x"] == {"a": 6.0, SEPARATE: 2.5}


def test_cudnn_takes_part_in_its_mode_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_graphs, "version", lambda: 91900)
    for mode in ("off", "on", "auto"):
        begin(mode, GPU)
        assert Model.choices.wanted_of_cudnn("forward x") is None
        assert "cuDNN" not in Model.choices.describe()
    begin(CUDNN, GPU)
    assert Model.choices.wanted_of_cudnn("forward x") == ""
    forms = {"a": 2.0, "cudnn engine1": 1.0, SEPARATE: 3.0}
    assert Model.choices.choose("forward x", Forms(**forms)(), GPU) == "cudnn engine1"
    assert Model.choices.choose("backward x", Forms(a=1.0, separate=2.0)(), GPU) == "a"
    Model.choices.missing |= {"backward x": "needs fp16", "cudnn weight": "is part of another"}
    assert Model.choices.wanted_of_cudnn("forward x") == "cudnn engine1"
    assert Model.choices.wanted_of_cudnn("backward x") is None
    Model.choices.adopt(Model.choices.own())
    # Shapes that the trial did not have are not asked for.
    assert Model.choices.wanted_of_cudnn("forward y") is None
    begin(CUDNN, GPU)
    assert Model.choices.wanted_of_cudnn("forward x") == "cudnn engine1"
    # A form that is gone is replaced.
    assert Model.choices.choose("forward x", Forms(a=2.0, separate=3.0)(), GPU) == "a"


def test_a_cached_choice_of_the_only_form_counts_as_used() -> None:
    """A 3 × 3 convolution has forms of cuDNN or none; ranks hear that the separate one was faster."""
    only = Forms(separate=2.0)()
    assert _fastest(Model.choices, "forward x", only, False, GPU) == 2.0
    assert Model.choices.own() == {}, "nothing to choose"
    Model.choices.chosen["forward x"] = SEPARATE
    assert _fastest(Model.choices, "forward x", only, False, GPU) == 2.0
    assert Model.choices.own() == {"forward x": SEPARATE}


def test_files_of_choices_are_those_of_a_device_versions_and_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(cudnn_graphs, "version", lambda: 91900)
    names = {}
    for mode in ("auto", "on", CUDNN):
        path = FILE(GPU, mode)
        names[mode] = path.name
    assert len(set(names.values())) == 3
    assert "91900" in names[CUDNN]
    assert "91900" not in names["auto"]
    path = FILE(GPU, CUDNN, "it is gone")
    assert path.name not in names.values()


def test_the_fastest_form_is_taken_and_timed_once() -> None:
    forms = Forms(a=3.0, b=1.0, separate=2.0)
    assert Model.choices.choose("forward x", forms(), GPU) == "b"
    assert Model.choices.choose("forward x", forms(), GPU) == "b"
    assert forms.calls == 3
    assert Model.choices.times["forward x"] == {"a": 3.0, "b": 1.0, SEPARATE: 2.0}
    assert Model.choices.describe() == "1 of 1 kinds of convolutions fused (1 timed)"


def test_all_forms_but_the_separate_one_are_built_before_one_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.undo()
    seen: list[tuple[str, bool]] = []

    def form(name: str) -> Callable[[], object]:
        def call() -> str:
            seen.append((name, building.get()))
            if name == "b" and building.get():
                raise RuntimeError("does not build")
            if name == "c":  # a product of two
                return Model.choices.choose(
                    "input x", {"d": form("d"), SEPARATE: form(SEPARATE)}, GPU
                )
            return name

        return call

    monkeypatch.setattr(implementation_choice, "_milliseconds", lambda call: len(str(call())))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Model.choices.path = None
    assert (
        Model.choices.choose("backward x", {n: form(n) for n in ("a", "b", "c", SEPARATE)}, GPU)
        == "a"
    )
    built = [("a", True), ("b", True), ("c", True)]
    timed = [("a", False), ("b", False), ("c", False), ("d", True), ("d", False)]
    assert seen == [*built, *timed, (SEPARATE, False), (SEPARATE, False)]
    assert not building.get()


def test_a_slower_fused_form_is_not_taken_unless_it_must() -> None:
    forms = Forms(a=3.0, separate=2.0)
    assert Model.choices.choose("backward x", forms(), GPU) == SEPARATE
    assert Model.choices.describe() == "0 of 1 kinds of convolutions fused (1 timed)"
    begin("on", GPU)
    assert Model.choices.choose("backward x", forms(), GPU) == "a"


def test_a_form_that_fails_is_left_out_with_its_reason() -> None:
    forms = Forms(a="out of resource: shared memory\nmore", b=2.0)
    assert Model.choices.choose("input x", forms(), GPU) == "b"
    assert Model.choices.problems == {"input x: a": "out of resource: shared memory"}
    assert Model.choices.choose("z", Forms(a="no")(), GPU) == "a", "raises for its user"
    assert Model.choices.choose("forward x", Forms(a="no", b=1.0, separate=2.0)(), GPU) == "b"
    assert (
        Model.choices.describe()
        == "1 of 1 kinds of convolutions fused (2 timed, 3 implementations failed)"
    )


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_where_nothing_works_the_separate_form_is_recorded(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(mode, GPU)
    forms = Forms(a="no", separate="no")
    assert Model.choices.choose("forward y", forms(), GPU) == SEPARATE
    calls = forms.calls
    assert calls == (2 if mode == "auto" else 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Model.choices.choose("forward y", forms(), GPU) == SEPARATE
    assert forms.calls == calls, "not tried again"
    Model.choices.adopt(Model.choices.own())
    begin(mode, GPU)
    assert Model.choices.chosen == {"forward y": SEPARATE}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
        torch.AcceleratorError("an illegal memory access"),
    ],
)
def test_what_says_nothing_about_a_form_is_neither_recorded_nor_kept(
    error: Exception, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        Model.choices.choose("forward x", Forms(a=error, separate=2.0)(), GPU)
    assert Model.choices.chosen == Model.choices.problems == {}
    assert list(tmp_path.iterdir()) == []


def test_later_runs_choose_alike_without_timing(tmp_path: Path) -> None:
    assert Model.choices.choose("forward x", Forms(a=1.0, separate=2.0)(), GPU) == "a"
    Model.choices.adopt(Model.choices.own())
    begin("auto", GPU)
    now_slower = Forms(a=9.0, separate=2.0)
    assert Model.choices.choose("forward x", now_slower(), GPU) == "a"
    assert now_slower.calls == 0
    assert Model.choices.describe() == "1 of 1 kinds of convolutions fused (cached)"
    # A form that is gone is chosen anew, and what another process has written is kept.
    (tmp_path / "auto.json").write_text('{"forward x": "old", "other": "b"}')
    begin("auto", GPU)
    assert Model.choices.describe() == "0 of 0 kinds of convolutions fused (none to choose)", (
        "or used"
    )
    assert Model.choices.choose("forward x", now_slower(), GPU) == SEPARATE
    Model.choices.adopt(Model.choices.own())
    begin("auto", GPU)
    assert Model.choices.chosen == {"forward x": SEPARATE, "other": "b"}


def damaged() -> list[bytes]:
    whole = json.dumps({"forward x": "a", "other": "b"}).encode()
    chance = random.Random(0)
    flipped = [bytearray(whole) for _ in range(50)]
    for text in flipped:
        text[chance.randrange(len(text))] = chance.randrange(256)
    return [
        b"", b"[]", b"null", b"3", b"\x00", b"\xff\xfe", b'{"forward x": 3}',
        b'{"forward x": {"a": []}}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000,
        b'{"forward x": NaN}', *(whole[:end] for end in range(len(whole))), *map(bytes, flipped),
    ]  # fmt: skip


def test_a_damaged_file_does_no_harm(tmp_path: Path) -> None:
    for content in damaged():
        (tmp_path / "auto.json").write_bytes(content)
        begin("auto", GPU)
        assert all(isinstance(text, str) for pair in Model.choices.chosen.items() for text in pair)
        assert Model.choices.choose("forward x", Forms(a=1.0)(), GPU) == "a", content
        Model.choices.adopt(Model.choices.own())
        begin("auto", GPU)
        assert Model.choices.chosen["forward x"] == "a", content
    (tmp_path / "auto.json").unlink()
    (tmp_path / "auto.json").mkdir()
    begin("auto", GPU)
    assert Model.choices.chosen == {}


def test_a_cache_that_cannot_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(implementation_choice, "_file", lambda *_: tmp_path / "file" / "a.json")
    begin("auto", GPU)
    assert Model.choices.choose("forward x", Forms(a=1.0)(), GPU) == "a"
    Model.choices.adopt(Model.choices.own())
    assert Model.choices.chosen == {"forward x": "a"}


def test_nothing_is_timed_in_a_capture_or_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms(a=3.0, separate=2.0)
    assert Model.choices.choose("forward x", forms(), CPU) == "a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Model.choices.choose("forward x", forms(), GPU) == SEPARATE
    assert forms.calls == 0
    assert Model.choices.chosen == {}


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_after_the_trial_other_shapes_take_the_separate_form_untimed(
    mode: str, tmp_path: Path
) -> None:
    """Choices of the file do not count: ranks on other hosts and resumed runs have other files."""
    (tmp_path / f"{mode}.json").write_text('{"forward short": "a"}')
    begin(mode, GPU)
    forms = Forms(a=1.0, separate=2.0)
    assert Model.choices.choose("forward x", forms(), GPU) == "a"
    calls = forms.calls
    assert not Model.choices.adopt(Model.choices.own())
    assert Model.choices.choose("forward x", forms(), GPU) == "a"
    assert Model.choices.choose("forward short", forms(), GPU) == SEPARATE
    assert Model.choices.choose("forward new", forms(), GPU) == SEPARATE
    assert forms.calls == calls
    assert Model.choices.describe() == "1 of 1 kinds of convolutions fused (1 timed)"


def test_what_ranks_have_agreed_on_holds_and_is_kept() -> None:
    forms = Forms(a=1.0, b=2.0, separate=3.0)
    assert Model.choices.choose("forward x", forms(), GPU) == "a"
    assert Model.choices.adopt({"forward x": "b", "forward of another rank": "a"})
    assert Model.choices.choose("forward x", forms(), GPU) == "b"
    assert Model.choices.describe() == "1 of 1 kinds of convolutions fused (1 timed)"
    begin("auto", GPU)
    assert Model.choices.choose("forward x", forms(), GPU) == "b"
    assert not Model.choices.adopt(Model.choices.own())
