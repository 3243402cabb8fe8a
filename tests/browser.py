"""A real Chromium for tests: pages, clicks, keys, hovering and screenshots over its debugging protocol, by pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "needs chromium (apt-get install chromium)"
_KEYS = {" ": "Space", "Enter": "Enter"}


class Page:
    """The one page of a browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._answers = os.fdopen(reading, "rb", buffering=0)
        self._calls = os.fdopen(writing, "wb", buffering=0)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Exceptions, and what the console has shown as an error or a warning."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        call |= {"sessionId": self._session} if self._session else {}
        self._calls.write(json.dumps(call).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._answers.read(1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        name, said = message.get("method"), message.get("params")
        if name == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"].get("exception", {}).get("description", "exception"))
        if name == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str([each.get("value") for each in said["args"]]))
        if name == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of a size, a phone's if it is narrow."""
        is_phone = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                   mobile=is_phone)  # fmt: skip
        self._call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._call("Page.navigate", url=path.as_uri())
        self.ask("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def print_style(self) -> None:
        """Show the page as it is printed, until another is opened."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def ask(self, expression: str) -> Any:
        """Return what a line of JavaScript gives, awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _middle(self, selector: str) -> dict[str, float]:
        place = (
            "(e => { e.scrollIntoView({block: 'center', inline: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2] })"
        )
        box = self.ask(f"{place}(document.querySelector({json.dumps(selector)}))")
        return {"x": box[0], "y": box[1]}

    def hover(self, selector: str) -> None:
        """Move the mouse over the middle of an element."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector: str) -> None:
        """Click the middle of an element, by the mouse."""
        place = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def tap(self, selector: str) -> None:
        """Tap the middle of an element, by a finger."""
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[self._middle(selector)])
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=_KEYS.get(key, key), **text)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what is seen as PNG; with `whole` the page to its end."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self._call("Browser.close")


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own, and end it."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (theirs_in, theirs_out)]  # clear of 3 and 4

    def as_three_and_four() -> None:
        for number, end in zip((3, 4), ends, strict=True):
            os.dup2(end, number)

    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
               "--hide-scrollbars", f"--user-data-dir={profile}", "--no-first-run"]  # fmt: skip
    process = subprocess.Popen(command, preexec_fn=as_three_and_four, pass_fds=(3, 4), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    for each in (theirs_in, theirs_out, *ends):
        os.close(each)
    try:
        page = Page(ours_in, ours_out)
        yield page
        page.close()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
