"""A real browser (Debian's chromium, driven headless), and run folders for it to look at."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from report.made_up_runs import served

IMAGES = Path(__file__).parents[2] / "docs/images"
DESKTOP, PHONE = (1180, 900), (390, 844)


class Browser:
    """One window; `look` shows a page at a size and in a colour scheme."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
            pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars", "--force-device-scale-factor=1"):  # fmt: skip
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(60)

    def look(self, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        # The page before this one may still have asked a server that has ended.
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, timeout_s: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return found

    def problems(self) -> list[str]:
        """Returns errors in scripts and refused resources."""
        return [
            entry["message"] for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]  # fmt: skip

    def screenshot(self, name: str) -> None:
        IMAGES.mkdir(exist_ok=True)
        path = IMAGES / f"{name}.png"
        self.driver.save_screenshot(str(path))
        from PIL import Image

        # Few colours: a page has hardly more, and the file is a quarter of the size.
        with Image.open(path) as image:
            image.convert("RGB").quantize(64).save(path, optimize=True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.driver.quit()


@contextlib.contextmanager
def serving(runs: Sequence[Path]) -> Iterator[str]:
    with served(runs) as server:
        yield server.url


Serve = Callable[[Sequence[Path]], contextlib.AbstractContextManager[str]]


@pytest.fixture
def serve() -> Serve:
    return serving
