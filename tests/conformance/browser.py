"""Scripts in a browser (Chromium): what those of an origin that is named read of the gate and of the upstream, what others
cannot, and WebSocket and events beside; over HTTP/1.1 in the clear, and over HTTP/2 with TLS."""

import http.server
import json
import os
import pathlib
import queue
import shutil
import signal
import sys
import threading
from urllib.parse import parse_qs, quote, urlsplit

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

import certificates  # noqa: E402
import gate  # noqa: E402
import websocket  # noqa: E402
from processes import start  # noqa: E402

ROUTES = """
[[routes]]
name = "all"
methods = ["POST"]
path = "/{{*rest}}"
cors = {{ origins = ["{shop}"], credentials = true }}

[[routes]]
name = "stream"
methods = ["POST"]
path = "/stream"
body = "stream"
cors = {{ origins = ["{shop}"], credentials = true }}
"""


class Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def give(self, status, body, lines=()):
        self.send_response(status)
        for name, value in lines:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Upstream(Quiet):
    """Shares its answers with every origin, but for `/unshared`, and allows what is asked in preflights."""

    runs, go, running, lock = 0, threading.Event(), set(), threading.Lock()

    def shared(self):
        origin = [("Access-Control-Allow-Origin", self.headers.get("Origin", "null")), ("Vary", "Origin")]
        return [*origin, ("Access-Control-Allow-Credentials", "true"), ("Timing-Allow-Origin", "*")]

    def do_OPTIONS(self):
        allowed = [("Access-Control-Allow-Headers", "content-type, idempotency-key"), ("Access-Control-Allow-Methods", "POST")]
        self.give(204, b"", [*self.shared(), *allowed])

    def do_POST(self):
        self.body()
        with self.lock:
            Upstream.runs += 1
            answer = json.dumps({"run": self.runs}).encode()
        if self.path == "/slow":
            self.running.add(self.headers["Idempotency-Key"])
            self.go.wait(20)
        lines = [] if self.path == "/unshared" else [*self.shared(), ("Access-Control-Expose-Headers", "X-Total")]
        lines += [("X-Total", "1"), ("X-Hidden", "1")]
        if self.path != "/stream":
            self.give(201, answer, lines)
            return
        self.begin(lines)
        for piece in (b"a" * 50_000, b"b" * 50_000, b"c"):
            self.piece(piece)
        self.piece(b"")

    def do_GET(self):
        self.begin([*self.shared(), ("Content-Type", "text/event-stream")])
        for nth in range(3):
            self.piece(f"data: {nth}\n\n".encode())
        self.piece(b"")

    def begin(self, lines):
        self.send_response(200)
        for name, value in [*lines, ("Transfer-Encoding", "chunked")]:
            self.send_header(name, value)
        self.end_headers()

    def piece(self, some):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(some), some))


class Page(Quiet):
    """The origin of the page."""

    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/running":
            key = parse_qs(url.query)["key"][0]
            self.give(200, json.dumps(key in Upstream.running).encode())
            return
        self.give(200, (HERE / "browser.html").read_bytes(), [("Content-Type", "text/html")])

    def do_POST(self):
        said = self.body()
        if self.path == "/go":
            Upstream.go.set()
        else:
            self.server.results.put(json.loads(said))
        self.give(200, b"{}")


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """A browser drops its connections at its end."""


def serving(handler):
    server = Server(("127.0.0.1", 0), handler)
    server.results = queue.Queue()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def visit(work, page, query):
    """What the page has seen when a browser has opened it."""
    Upstream.go.clear()
    Upstream.running.clear()
    profile = work / "chromium"
    shutil.rmtree(profile, ignore_errors=True)
    url = f"http://localhost:{page.server_port}/?{query}"
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--ignore-certificate-errors", f"--user-data-dir={profile}", url,
    ]
    with open(work / "chromium.log", "wb") as log:
        browser = start(command, log, env={**os.environ, "HOME": str(work)})
    try:
        return page.results.get(timeout=60)
    except queue.Empty:
        print((work / "chromium.log").read_text(errors="replace")[-3000:])
        raise SystemExit("tests/conformance/run: the browser says nothing") from None
    finally:
        os.killpg(browser.pid, signal.SIGTERM)
        browser.wait()


def read(one, status, headers=(), code=None):
    """Whether a script read this answer: the headers with these values, and no others."""
    if one.get("status") != status:
        return False
    given = {name: value for name, value in one["headers"].items() if name not in ("Idempotency-Expires", "Retry-After")}
    return given == dict(headers) and (code is None or json.loads(one["body"])["code"] == code)


def judged(seen, is_named, protocol):
    """(what, whether it holds)"""
    total = {"X-Total": "1"}

    def ours(status, more=()):
        return {**dict(more), "Idempotency-Status": status} if is_named else dict(more)

    def problem(one, status, code):
        if is_named:
            return read(one, status, {"Idempotency-Status": code}, code)
        return one == {"error": "TypeError"}

    for name in ("first", "cookies", "slow"):
        yield f"{name}: the answer is read", read(seen[name], 201, ours("executed", total))
    replay = {**total, "Idempotent-Replayed": "true"} if is_named else total
    yield "replay: it is read", read(seen["replay"], 201, ours("replayed", replay))
    yield "replay: the same body", seen["replay"]["body"] == seen["first"]["body"]
    yield "expiry: read by those named", ("Idempotency-Expires" in seen["first"]["headers"]) == is_named
    yield "key-reused", problem(seen["reused"], 422, "key-reused")
    yield "key-invalid", problem(seen["invalid"], 400, "key-invalid")
    yield "key-reused, with cookies", problem(seen["cookiesReused"], 422, "key-reused")
    yield "in-flight", problem(seen["inFlight"], 409, "in-flight")
    yield "in-flight: Retry-After", not is_named or int(seen["inFlight"].get("headers", {}).get("Retry-After", 0)) >= 1
    yield "unprotected", read(seen["unprotected"], 201, total)
    yield "what the upstream does not share", seen["unshared"] == {"error": "TypeError"}
    yield "a stream", read(seen["streamed"], 200, ours("executed", total)) and len(seen["streamed"]["body"]) == 100_001
    yield "a stream, replayed", read(seen["streamedAgain"], 200, ours("replayed", replay)) and (
        seen["streamedAgain"]["body"] == seen["streamed"]["body"]
    )
    yield "events", seen["events"] == ["0", "1", "2"]
    yield f"spoken: {protocol}", seen["protocols"] == [protocol]
    yield "WebSocket", seen["chat"] == "größer" and seen["chatClosed"] == [4001, "enough", True]


def main(work):
    work = pathlib.Path(work)
    directory = certificates.made(work / "certificates")
    upstream, shop, other = serving(Upstream), serving(Page), serving(Page)
    chat = websocket.Upstream()
    behind, talk = f"http://127.0.0.1:{upstream.server_port}", f"http://127.0.0.1:{chat.port}"
    routes = ROUTES.format(shop=f"http://localhost:{shop.server_port}")
    held = []
    for scheme, protocol in (("http", "http/1.1"), ("https", "h2")):
        lines = certificates.listener(directory) if scheme == "https" else ""
        with gate.started(work, f"browser-{scheme}", behind, lines, routes) as between, \
                gate.started(work, f"browser-chat-{scheme}", talk, lines) as talking:
            for name, page in (("shop", shop), ("other", other)):
                to_chat = f"{scheme.replace('http', 'ws')}://localhost:{talking.port}/echo"
                query = f"name={name}&gate={quote(f'{scheme}://localhost:{between.port}')}&chat={quote(to_chat)}"
                seen = visit(work, page, query)
                if "failed" in seen:
                    print(seen)
                for what, holds in judged(seen, name == "shop", protocol):
                    held.append(holds)
                    if not holds:
                        print(f"{scheme}, {name}: {what}: does not hold\n  {seen}")
    print(f"tests/conformance/run: {gate.said_by('chromium', '--version')}: {sum(held)} of {len(held)} cases hold")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
