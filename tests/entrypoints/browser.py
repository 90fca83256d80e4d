"""A headless Chromium, driven over the WebDriver protocol (https://www.w3.org/TR/webdriver2/) by plain HTTP."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-color-profile=srgb"
).split()
PHONE, DESKTOP = (360, 740), (1180, 820)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element


class Browser:
    """A browser with one tab. Elements are named by CSS selectors; a wait ends after half a minute.

    Args:
        folder: An empty one for its profile.

    Attributes:
        size: Width and height in CSS pixels.
    """

    size = DESKTOP

    def __init__(self, folder: Path) -> None:
        assert DRIVER is not None
        assert CHROMIUM is not None
        command = [DRIVER, "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._driver.stdout is not None
        lines = iter(self._driver.stdout.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"successfully on port (\d+)", line)))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self._call("POST", "/session", capabilities={"alwaysMatch": always})
        self._session = f"/session/{session['sessionId']}"

    def close(self) -> None:
        """Ends the browser and all of its processes."""
        with suppress(httpx.HTTPError):
            self._call("DELETE", self._session)
        self._http.close()
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()
        assert self._driver.stdout is not None
        self._driver.stdout.close()

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        response = self._http.request(method, path, **({"json": fields} if method == "POST" else {}))
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def _do(self, path: str, **fields: Any) -> Any:
        return self._call("POST", self._session + path, **fields)

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self._do("/goog/cdp/execute", cmd=command, params=parameters)

    def look(self, size: tuple[int, int], *, scheme: str = "light") -> None:
        """Takes a size, that of a phone with its touch screen, and a colour scheme."""
        self.size = size
        is_phone = size == PHONE
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            width=size[0], height=size[1], deviceScaleFactor=2 if is_phone else 1, mobile=is_phone,
        )  # fmt: skip
        self._cdp("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Opens a page as if for the first time, whatever the address was before."""
        self._do("/url", url="about:blank")
        self._do("/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function's body returns; a promise is awaited."""
        return self._do("/execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any) -> Any:
        """What the script returns, once that is true."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.05)
        raise AssertionError(f"this did not come true: {script}\n{self.run('return document.body.innerText')}")

    def click(self, selector: str) -> None:
        self._do(f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Types into an element that has the focus or can have it, in place of what is there."""
        element = self._find(selector)
        self._do(f"/element/{element}/clear")
        self._do(f"/element/{element}/value", text=text)

    def choose_file(self, selector: str, path: Path) -> None:
        """Gives a file to a file chooser."""
        self._do(f"/element/{self._find(selector)}/value", text=str(path))

    def press(self, *keys: str) -> None:
        """Presses keys together, wherever the focus is."""
        actions = [
            {"type": kind, "value": key} for kind, order in (("keyDown", keys), ("keyUp", keys[::-1])) for key in order
        ]
        self._do("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def _find(self, selector: str) -> str:
        found: str = self._do("/element", using="css selector", value=selector)[_ELEMENT]
        return found

    def text(self, selector: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector
        )
        return found

    def complaints(self) -> list[str]:
        """What the console has said since the last time."""
        return [entry["message"] for entry in self._do("/se/log", type="browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last time."""
        events = [json.loads(entry["message"])["message"] for entry in self._do("/se/log", type="performance")]
        return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]

    def picture(self) -> bytes:
        """A PNG of the whole page."""
        size = self._cdp("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])
