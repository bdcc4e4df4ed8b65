"""`install(output)`: writes which modules of Paceline this process has imported when it ends.

The fork server has imported more than a training needs. So its modules are forgotten first, and the
command imports those that it needs again.
"""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path


def install(output: Path) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "paceline":
            del sys.modules[name]

    def write() -> None:
        loaded = {
            name: m for name, m in sys.modules.items() if name.partition(".")[0] == "paceline"
        }
        output.write_text(json.dumps([module.__file__ for module in loaded.values()]))

    atexit.register(write)
