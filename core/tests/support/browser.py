"""A real browser for tests: Chromium, told what to do through its debugging pipe. Nothing but the standard library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium. ``troubles``: errors of scripts and of the console, and requests beside the
    page's own."""

    def __init__(self, width: int, height: int, *, dark: bool = False) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="kvist-browser-")
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        options = (
            "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage "
            f"--remote-debugging-pipe --user-data-dir={self._folder}"
        )
        script = f'exec "{PROGRAM}" {options} about:blank 3<&{read_there} 4>&{write_there}'
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.troubles: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._write)
        try:
            # Without its pipe it ends.
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, path: Path) -> None:
        """Show a file, once it is loaded."""
        self._page = path.as_uri()
        self.call("Page.navigate", url=self._page)
        end = time.monotonic() + 30
        while self.run("document.readyState") != "complete" or self.run("location.href") != self._page:
            assert time.monotonic() < end, "the page is never loaded"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression, which can be told as JSON."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse to a place in an element, which is scrolled into view."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y, width, height = self.run(
            f"(box => [box.x, box.y, box.width, box.height])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self._at = {"x": x + width * across, "y": y + height * down}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._at)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        self.move(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **self._at)

    def press(self, key: str) -> None:
        """Press a key that types nothing."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def call(self, method: str, **arguments: Any) -> Any:
        """One command, and its answer; takes note of what happens meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._read, 1 << 16)
                assert part, "the browser has ended"
                self._buffer += part
            line, self._buffer = self._buffer.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(about["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.troubles.append(about["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent" and about["request"]["url"] not in (
            self._page,
            "about:blank",
        ):
            self.troubles.append(f"asks for {about['request']['url']}")

    _page = ""
