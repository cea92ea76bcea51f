"""A headless Chromium for tests, through chromedriver's own REST interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.left_out import leave_out
from tests.support.waiting import DEADLINE_S

_DRIVER = "chromedriver"
_BROWSER = "chromium"
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
)


def has_browser() -> bool:
    """Return True if this machine has Chromium and chromedriver."""
    return which(_DRIVER) is not None and which(_BROWSER) is not None


def leave_out_without_browser(
    config: pytest.Config, items: list[pytest.Item], *, folder: str = "tests/report"
) -> None:
    """Skip tests of `folder` that use the fixture `browser` if it is missing, and report them."""
    if not has_browser():
        leave_out(
            config,
            items,
            [
                item
                for item in items
                if item.nodeid.startswith(folder) and "browser" in getattr(item, "fixturenames", ())
            ],
            folder=folder,
            why="that open a page: they need Chromium (apt-get install chromium chromium-driver).",
        )


class Browser:
    """One browser with one window, which records console messages and network requests."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._driver: subprocess.Popen[str] | None = None
        self._base = ""

    def __enter__(self) -> Self:
        self._driver = subprocess.Popen(
            [_DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                self._base = f"http://127.0.0.1:{found[1]}"
                break
        options = {
            "binary": which(_BROWSER),
            "args": [*_ARGUMENTS, f"--user-data-dir={self._profile}"],
        }
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._base += f"/session/{made['sessionId']}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._driver is not None
        try:
            if "/session/" in self._base:
                self._ask("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=DEADLINE_S)

    def open(self, page: Path) -> None:
        """Load a file, and wait until it is rendered."""
        self.console()
        self.requests()
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """Return the result of a function body that is run in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page, and its light or dark colour scheme."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"media": "", "features": features})
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn twice."""
        script = (
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => done(true)));"
        )
        self._ask("POST", "/execute/async", {"script": script, "args": []})

    def screenshot(self, path: Path) -> None:
        """Save a screenshot as a PNG file."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot", None)))

    def print_pdf(self) -> bytes:
        """Return the page as printed."""
        return base64.b64decode(self._ask("POST", "/print", {}))

    def drag(self, selector: str, *, start: float, end: float) -> None:
        """Drag over an element, between two fractions of its width."""
        x, y = self._point(selector, start, 0.5)
        to, _ = self._point(selector, end, 0.5)
        self._point_at(
            {"type": "pointerMove", "duration": 0, "x": x, "y": y},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 20, "x": to, "y": y},
            {"type": "pointerUp", "button": 0},
        )

    def hover(self, selector: str, *, across: float, down: float = 0.5) -> None:
        """Move the pointer over an element, to a fraction of its width and its height."""
        x, y = self._point(selector, across, down)
        self._point_at({"type": "pointerMove", "duration": 0, "x": x, "y": y})

    def double_click(self, selector: str) -> None:
        """Double-click the middle of an element."""
        x, y = self._point(selector, 0.5, 0.5)
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.run(
            "window.isDoubled = false; document.addEventListener('dblclick',"
            " () => { window.isDoubled = true; }, {capture: true, once: true});"
        )
        ends = time.monotonic() + DEADLINE_S
        # On a busy machine, the clicks can be too far apart for the browser.
        while not self.run("return window.isDoubled"):
            assert time.monotonic() < ends, f"no double click on {selector} in {DEADLINE_S:g} s"
            self._point_at({"type": "pointerMove", "duration": 0, "x": x, "y": y}, *press, *press)

    def _point(self, selector: str, across: float, down: float) -> tuple[int, int]:
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        # The scroll event comes with the next frame; until then uPlot has the plot's old position.
        self.settle()
        left, top, width, height = self.run(
            "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height];",
            selector,
        )
        return round(left + width * across), round(top + height * down)

    def _point_at(self, *actions: Mapping[str, object]) -> None:
        source = {"type": "pointer", "id": "mouse", "actions": actions}
        self._ask("POST", "/actions", {"actions": [source]})
        self.settle()

    def console(self) -> list[str]:
        """Return the log since the last call: errors, warnings, policy violations."""
        return [each["message"] for each in self._log("browser")]

    def requests(self) -> list[str]:
        """Return every URL requested since the last call, except the browser's internal pages.

        A new browser loads its new tab from chrome:// at an unpredictable time.
        """
        events = [json.loads(each["message"])["message"] for each in self._log("performance")]
        asked = [
            str(each["params"]["request"]["url"])
            for each in events
            if each["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("chrome://")]

    def _log(self, kind: str) -> Any:
        return self._ask("POST", "/se/log", {"type": kind})

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self._base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)["value"]
