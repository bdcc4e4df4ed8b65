"""Which form of a product is taken: by time, once, and from a file of earlier choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.models import product_choice
from paceline.models.product_choice import SEPARATE, begin, choices, choose

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Forms:
    """Forms that take the given times; a string is an error that is raised."""

    def __init__(self, **times: float | str) -> None:
        self.times, self.calls = times, 0

    def __call__(self) -> dict[str, Callable[[], object]]:
        def form(name: str) -> Callable[[], object]:
            def call() -> float:
                self.calls += 1
                found = self.times[name]
                if isinstance(found, str):
                    raise RuntimeError(found)
                return found

            return call

        return {name: form(name) for name in self.times}


@pytest.fixture(autouse=True)
def _on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(product_choice, "_file", lambda device, mode: tmp_path / f"{mode}.json")
    monkeypatch.setattr(product_choice, "_milliseconds", lambda call: call())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    begin("auto", GPU)
    yield
    begin("auto", CPU)


def test_the_fastest_form_is_taken_and_timed_once() -> None:
    forms = Forms(a=3.0, b=1.0, separate=2.0)
    assert choose("forward x", forms(), GPU) == "b"
    assert choose("forward x", forms(), GPU) == "b"
    assert forms.calls == 3
    assert choices.times["forward x"] == {"a": 3.0, "b": 1.0, SEPARATE: 2.0}
    assert choices.describe() == "1 of 1 kinds of products fused (1 timed)"


def test_a_slower_fused_form_is_not_taken_unless_it_must() -> None:
    forms = Forms(a=3.0, separate=2.0)
    assert choose("backward x", forms(), GPU) == SEPARATE
    assert choices.describe() == "0 of 1 kinds of products fused (1 timed)"
    begin("on", GPU)
    assert choose("backward x", forms(), GPU) == "a"


def test_a_form_that_fails_is_left_out_with_its_reason() -> None:
    forms = Forms(a="out of resource: shared memory\nmore", b=2.0)
    assert choose("input x", forms(), GPU) == "b"
    assert choices.problems == {"input x: a": "out of resource: shared memory"}
    assert choose("y", Forms(a="no", separate="no")(), GPU) == SEPARATE
    assert choose("z", Forms(a="no")(), GPU) == "a", "raises for its user"
    assert "y" not in choices.chosen


def test_later_runs_choose_alike_without_timing(tmp_path: Path) -> None:
    assert choose("forward x", Forms(a=1.0, separate=2.0)(), GPU) == "a"
    begin("auto", GPU)
    now_slower = Forms(a=9.0, separate=2.0)
    assert choose("forward x", now_slower(), GPU) == "a"
    assert now_slower.calls == 0
    assert choices.describe() == "1 of 1 kinds of products fused (cached)"
    # A form that is gone is chosen anew, and what another process has written is kept.
    (tmp_path / "auto.json").write_text('{"forward x": "old", "other": "b"}')
    begin("auto", GPU)
    assert choose("forward x", now_slower(), GPU) == SEPARATE
    begin("auto", GPU)
    assert choices.chosen == {"forward x": SEPARATE, "other": "b"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"forward x": 3}', "\x00"])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "auto.json").write_text(text)
    begin("auto", GPU)
    assert choices.chosen == {}
    assert choose("forward x", Forms(a=1.0)(), GPU) == "a"


def test_a_cache_that_cannot_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(product_choice, "_file", lambda device, mode: tmp_path / "file" / "a.json")
    begin("auto", GPU)
    assert choose("forward x", Forms(a=1.0)(), GPU) == "a"


def test_nothing_is_timed_in_a_capture_or_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms(a=3.0, separate=2.0)
    assert choose("forward x", forms(), CPU) == "a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("forward x", forms(), GPU) == "a"
    assert forms.calls == 0
    assert choices.chosen == {}
