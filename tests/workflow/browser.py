"""A page in Chromium without a screen, by the DevTools protocol over a pipe: what it shows, what it complains of.

    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        browser.evaluate("document.title")
        assert browser.complaints() == []

A complaint is an error on the console, an exception, a request that failed, or one for anything that is no part of the
page: only the file itself and what is written inside it (data:) may be asked for. Protocol: messages of JSON, each
ended by a zero byte, on descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --remote-debugging-pipe"
INSIDE = ("data:", "blob:", "about:")
LIMIT_S = 60.0


class Browser:
    """One window. Its profile is a new folder; the process ends with the block."""

    def __init__(self, profile: Path, width: int = 1600, height: int = 1000) -> None:
        self._command = f"exec {shlex.quote(PROGRAM)} {FLAGS} --user-data-dir={shlex.quote(str(profile))}"
        self._command += f" --window-size={width},{height} about:blank"
        self._received, self._buffer, self._number = [], b"", 0
        self.contexts: list[dict] = []  # where scripts run, of every frame that is there now
        self._page = ""

    def __enter__(self) -> Browser:
        reading, theirs_out = (_high(fd) for fd in os.pipe())
        theirs_in, writing = (_high(fd) for fd in os.pipe())
        command = f"{self._command} 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(["bash", "-c", command], pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in), os.close(theirs_out)
        self._reading, self._writing = reading, writing
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        target = {"targetId": page["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **target)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._reading), os.close(self._writing)

    def open(self, path: Path) -> None:
        self._page = path.resolve().as_uri()
        self.call("Page.navigate", url=self._page)
        end = time.monotonic() + LIMIT_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._received):
            assert time.monotonic() < end, f"{path} is never loaded"
            self._receive(0.1)

    def evaluate(self, script: str, frame: int = 0):
        """The value of an expression of JavaScript; frame: 0 the page, 1 the first frame inside it."""
        where = {"contextId": self.contexts[frame]["id"]} if frame else {}
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, **where)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, frame: int = 0):
        """Evaluate until it is true, and return it."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if frame < len(self.contexts) and (value := self.evaluate(script, frame)):
                return value
            self._receive(0.05)
        raise AssertionError(f"never true: {script}")

    def picture(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return path

    def complaints(self) -> list[str]:
        self._receive(0.2)
        found = []
        for event in self._received:
            name, said = event["method"], event["params"]
            if name == "Runtime.exceptionThrown":
                found.append(f"exception: {said['exceptionDetails']}")
            elif name == "Log.entryAdded" and said["entry"]["level"] == "error":
                found.append(f"log: {said['entry']['text']} {said['entry'].get('url', '')[:100]}")
            elif name == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
                found.append(f"console: {[value.get('value') for value in said['args']]}")
            elif name == "Network.loadingFailed" and not said.get("canceled"):
                found.append(f"request failed: {said['errorText']}")
            elif name == "Network.requestWillBeSent":
                url = said["request"]["url"]
                if not url.startswith(INSIDE) and url.partition("#")[0] != self._page:
                    found.append(f"asked for {url}")
        return found

    def call(self, method: str, **parameters) -> dict:
        """One method of the protocol, to its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if not method.startswith("Target."):
            message["sessionId"] = self._session
        _write(self._writing, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for answer in self._receive(0.1):
                if answer["id"] == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
            assert self._process.poll() is None, f"{PROGRAM} ended with {self._process.returncode}"
        raise AssertionError(f"no answer to {method}")

    def _receive(self, seconds: float) -> list[dict]:
        """Read what is there, waiting at most so long: answers are returned, events kept."""
        answers = []
        while select.select([self._reading], [], [], seconds)[0]:
            if not (part := os.read(self._reading, 1 << 20)):
                break
            *messages, self._buffer = (self._buffer + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    answers.append(message)
                else:
                    self._note(message)
            if answers:
                break
        return answers

    def _note(self, event: dict) -> None:
        self._received.append(event)
        if event["method"] == "Runtime.executionContextCreated":
            self.contexts.append(event["params"]["context"])
        elif event["method"] == "Runtime.executionContextDestroyed":
            gone = event["params"]["executionContextId"]
            self.contexts = [context for context in self.contexts if context["id"] != gone]
        elif event["method"] == "Runtime.executionContextsCleared":
            self.contexts = []


def _high(descriptor: int) -> int:
    """The same descriptor with a number that the browser's 3 and 4 cannot collide with."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
