from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.sources.name_table import NameTable


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12)))
def test_gives_back_what_it_got(names: list[str]) -> None:
    table = NameTable(names)
    assert len(table) == len(names)
    assert [table[i] for i in range(len(table))] == names


def test_file_names_that_are_no_text_survive() -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    assert NameTable(["a", name])[1] == name


def test_no_name_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        NameTable(["a"])[1]
    with pytest.raises(IndexError):
        NameTable(["a"])[-1]
