"""Rows are named by as few settings as tell them apart."""

from paceline.report.compare_runs import differing, identity, label, naming, short_names, value_text

A = {"optim.name": "sgd", "run.global_batch_size": 250, "optim.lr_base": 0.2, "data.dir": "d"}
B = {"optim.name": "lars", "run.global_batch_size": 250, "optim.lr_base": 3.0, "data.dir": "d"}
C = {"optim.name": "lars", "run.global_batch_size": 2500, "optim.lr_base": 3.0, "data.dir": "d"}


def test_identity_knows_values_not_their_order_or_type() -> None:
    assert identity({"a": 1, "b": [2]}) == identity({"b": [2.0], "a": 1.0})
    assert identity({"a": 1}) != identity({"a": True})
    assert identity({"a": 1}) != identity({"a": "1"})
    assert identity({"a": 1}) != identity({})


def test_what_differs_the_most_telling_first() -> None:
    assert differing([A, B, C]) == ["optim.name", "run.global_batch_size", "optim.lr_base"]
    assert differing([A, A]) == []
    assert differing([A, {k: v for k, v in A.items() if k != "data.dir"}]) == ["data.dir"]
    assert differing([{"run.threads": 1, "odd.x": 1, "optim.z": 1}, {}]) == [
        "optim.z", "odd.x", "run.threads"
    ]  # fmt: skip


def test_no_more_settings_than_tell_the_rows_apart() -> None:
    assert naming([A, B, C], differing([A, B, C])) == ["optim.name", "run.global_batch_size"]
    assert naming([A, B], differing([A, B])) == ["optim.name"]
    assert naming([A, A, C], differing([A, A, C])) == ["optim.name"]
    assert naming([A, A], []) == []


def test_names_are_as_short_as_they_can_be() -> None:
    short = short_names(["optim.name", "model.name", "optim.decay_bias_norm", "ranks"])
    assert short == {
        "optim.name": "optim.name",
        "model.name": "model.name",
        "optim.decay_bias_norm": "decay_bias_norm",
        "ranks": "ranks",
    }


def test_a_label() -> None:
    names = ["optim.name", "run.global_batch_size"]
    short = short_names([*names, "run.name"])
    assert label(C, names, short) == "optim.name=lars global_batch_size=2500"
    assert label(C, [], short) == ""


def test_values_in_one_word() -> None:
    values = {
        "on": True, "list": [2.0, 3.0], "none": "", "tiny": 5e-05, "fine": 0.1234567, "evil": "a\x1b"
    }  # fmt: skip
    shown = {name: value_text(values, name) for name in (*values, "absent")}
    assert shown == {
        "on": "true",
        "list": "[2,3]",
        "none": '""',
        "tiny": "5e-05",
        "fine": "0.1234567",
        "evil": "a\N{REPLACEMENT CHARACTER}",
        "absent": "unset",
    }
