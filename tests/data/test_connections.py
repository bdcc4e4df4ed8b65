from __future__ import annotations

from paceline.data.on_device.connections import VARIABLE, widen_connections


def test_all_of_them_unless_the_user_said_otherwise() -> None:
    environment: dict[str, str] = {}
    widen_connections(environment)
    assert environment == {VARIABLE: "32"}
    environment[VARIABLE] = "1"
    widen_connections(environment)
    assert environment == {VARIABLE: "1"}
