"""Chromium, driven by its DevTools protocol over a pipe: what a person does with a keyboard and sees on a screen."""

import base64
import json
import os
import select
import signal
import subprocess
import tempfile
import time

PATIENCE = 60
# (code, virtual key, text) of keys that are not their own name.
KEYS = {
    "Tab": ("Tab", 9, None), "Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, None), " ": ("Space", 32, " "),
    "ArrowDown": ("ArrowDown", 40, None), "/": ("Slash", 191, "/"), "?": ("Slash", 191, "?"),
}


class Browser:
    """One tab."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, ours = os.pipe()
        theirs, from_browser = os.pipe()[::-1]
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
                   "--force-prefers-reduced-motion=0", f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads commands from descriptor 3, and writes to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{theirs}'
        self.process = subprocess.Popen(["bash", "-c", script, "bash", *command], pass_fds=(to_browser, theirs), start_new_session=True,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(theirs)
        self.ours, self.from_browser = ours, from_browser
        self.buffer, self.last, self.session = b"", 0, None
        # What a page asked for, what failed in it, and what its policy refused.
        self.urls, self.failures = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # A test may stand between the page and the gate: see between().
        self.call("Page.addScriptToEvaluateOnNewDocument", source="""{
            const real = fetch;
            window.fetch = (path, options) => window.between ? window.between(real, path, options) : real(path, options);
        }""")

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.ours)
        os.close(self.from_browser)
        self.profile.cleanup()

    def call(self, method, **parameters):
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.ours, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            said = self.receive(deadline)
            if said.get("id") == self.last:
                if "error" in said:
                    raise AssertionError(f"{method}: {said['error']}")
                return said["result"]
            self.note(said)

    def receive(self, deadline):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError("the browser does not answer")
            some = os.read(self.from_browser, 1 << 20)
            if not some:
                raise AssertionError("the browser has ended")
            self.buffer += some
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def note(self, said):
        parameters = said.get("params", {})
        match said.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.failures.append(json.dumps(parameters["exceptionDetails"])[:600])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.failures.append(json.dumps(parameters["args"])[:600])
            # An answer that is a problem is logged there too; the page shows it.
            case "Log.entryAdded" if parameters["entry"]["source"] != "network":
                self.failures.append(f"{parameters['entry']['source']}: {parameters['entry']['text']}")

    def evaluate(self, expression):
        """The value of a JavaScript expression, once it is there."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {json.dumps(result['exceptionDetails'])[:800]}")
        return result["result"].get("value")

    def between(self, function):
        """What the page asks for goes through a JavaScript function of (real, path, options), until the page is loaded anew."""
        self.evaluate(f"void (window.between = {function})")

    def until(self, what, expression):
        """Waits for an expression to be true."""
        deadline = time.monotonic() + PATIENCE
        while True:
            if self.evaluate(f"(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()"):
                return
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(f"{what}: never; the page shows:\n{shown}")
            time.sleep(0.05)

    def says(self, text):
        """Waits until the page shows a text."""
        self.until(f"the page says {text!r}", f"document.body.innerText.includes({json.dumps(text)})")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until(f"{url} is loaded", f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def go(self, hash, heading):
        self.evaluate(f"void (location.hash = {json.dumps(hash)})")
        self.until(f"{hash} is shown", f"document.querySelector('#content h1').textContent === {json.dumps(heading)}")

    def key(self, key, shift=False):
        code, number, text = KEYS.get(key, (f"Digit{key}" if key.isdigit() else f"Key{key.upper()}", ord(key.upper()) if len(key) == 1 else 0, key))
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **({"text": text} if text else {}), **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def tab_to(self, what, test, most=60):
        """Presses Tab until the element in focus passes a test, and sees that the focus can be seen."""
        # The page may still load the element.
        self.until(f"{what} is there", f"[...document.querySelectorAll('body *')].some(element => {test})")
        for _ in range(most):
            self.key("Tab")
            if self.evaluate(f"(element => {test})(document.activeElement)"):
                outline = self.evaluate("(style => style.outlineStyle + ' ' + style.outlineWidth)(getComputedStyle(document.activeElement))")
                assert outline not in ("none 0px",) and not outline.startswith("none"), f"{what}: the focus cannot be seen: {outline}"
                return
        raise AssertionError(f"{what} is not reached by {most} times Tab")

    def screen(self, width, height, theme, motion="no-preference"):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": motion}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
