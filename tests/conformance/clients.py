"""Clients of other makes: varnishtest (varnishtest/*.vtc, which are both client and upstream), curl and nghttp."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import gate  # noqa: E402
from processes import free_port  # noqa: E402


class Echo(http.server.BaseHTTPRequestHandler):
    """An upstream that says what it got."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline() != b"\r\n":
                pass
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        names = {name.lower(): value for name, value in self.headers.items()}
        said = json.dumps({"method": self.command, "target": self.path, "headers": names, "body": len(body)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    do_GET = do_HEAD = do_POST = do_PUT = do_OPTIONS = do_DELETE = answer

    def log_message(self, *_):
        pass


def main():
    work = pathlib.Path(sys.argv[1])
    failed = [name for name, holds in [*varnishtest(work), *by_hand(work)] if not holds]
    for name in failed:
        print(f"tests/conformance/run: {name}: does not hold")
    sys.exit(1 if failed else 0)


def varnishtest(work):
    """Each file, with a gate of its own."""
    held = []
    for case in sorted((HERE / "varnishtest").glob("*.vtc")):
        port = free_port()
        with gate.started(work, f"vtc-{case.stem}", f"http://127.0.0.1:{port}") as running:
            macros = [f"-Dgate=127.0.0.1:{running.port}", f"-Dupstream=127.0.0.1:{port}"]
            command = ["varnishtest", "-t", "20", *macros, str(case)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        if done.returncode:
            print(done.stdout[-3000:])
        held.append((f"varnishtest {case.name}", done.returncode == 0))
    print(f"tests/conformance/run: varnishtest: {sum(ok for _, ok in held)} of {len(held)} cases hold")
    return held


def by_hand(work):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    held = []
    with gate.started(work, "clients", f"http://127.0.0.1:{server.server_port}") as running, \
            tempfile.NamedTemporaryFile() as large:
        large.write(os.urandom(3 << 20))
        large.flush()
        base = f"http://127.0.0.1:{running.port}"
        for name, command, judge in commands(base, large.name):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
            ok = judge(done)
            if not ok:
                print(f"{name}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            held.append((name, ok))
    server.shutdown()
    print(f"tests/conformance/run: curl and nghttp: {sum(ok for _, ok in held)} of {len(held)} cases hold")
    return held


def commands(base, large):
    """(name, command, what must hold of it)"""

    def curl(*words):
        return ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code} %{num_connects} %{http_version}", *words]

    def says(status, **about):
        def judge(done):
            body, _, last = done.stdout.rpartition("\n")
            if done.returncode or last.split()[0] != str(status):
                return False
            said = json.loads(body) if about else {}
            return all(said[name] == value for name, value in about.items())

        return judge

    def got(*codes):
        return lambda done: done.stdout.rpartition("\n")[2].split()[0] in codes

    key = ["-H", "Idempotency-Key: curl-1", "-d", "amount=1"]
    yield "curl: a key", curl(*key, f"{base}/charges"), says(200, method="POST", body=8)
    yield "curl: a retry", curl(*key, "-D", "-", f"{base}/charges"), lambda d: "idempotent-replayed: true" in d.stdout.lower()
    yield "curl: a large upload, asked for by 100", curl("-T", large, f"{base}/up"), says(200, method="PUT", body=3 << 20)
    yield "curl: a large upload with a key", curl(
        "-H", "Idempotency-Key: curl-2", "-H", "Expect: 100-continue", "--data-binary", f"@{large}", f"{base}/up"
    ), says(200, method="POST", body=3 << 20)
    yield "curl: an upload in chunks", curl("-T", large, "-H", "Transfer-Encoding: chunked", f"{base}/up"), says(200, body=3 << 20)
    yield "curl: HTTP/1.0", curl("--http1.0", f"{base}/x"), says(200, method="GET")
    yield "curl: a path as it is", curl("--path-as-is", f"{base}/a%2Fb//c;d?e=%20"), says(200, target="/a%2Fb//c;d?e=%20")
    yield "curl: HEAD", curl("-I", f"{base}/x"), got("200")
    yield "curl: OPTIONS of everything", curl("-X", "OPTIONS", "--request-target", "*", base), says(200, target="*")
    yield "curl: as through a proxy", curl("-x", base, "http://shop.example/x?y=1"), says(200, target="/x?y=1")
    yield "curl: CONNECT", curl("-p", "-x", base, "http://shop.example/"), lambda done: done.returncode == 56
    yield "curl: an upgrade to HTTP/2 that is passed over", curl("--http2", f"{base}/x"), says(200, method="GET")
    yield "curl: HTTP/2 at once", curl("--http2-prior-knowledge", f"{base}/x"), lambda done: done.returncode not in (0, 28)
    yield "curl: another expectation", curl("-H", "Expect: payment", "-d", "a=1", f"{base}/x"), got("417")
    yield "curl: a head that is too large", curl("-H", f"X-A: {'a' * 70000}", f"{base}/x"), got("431")
    yield "curl: a body that is too large", curl(
        "-H", "Idempotency-Key: curl-3", "-H", "Content-Length: 99000000", "-H", "Expect:", "-X", "POST",
        "--data-binary", f"@{large}", f"{base}/x",
    ), got("413")
    yield "nghttp: an upgrade to HTTP/2", ["nghttp", "-u", "-t", "10", f"{base}/x"], lambda done: "Upgrade" in done.stdout + done.stderr
    yield "nghttp: HTTP/2 at once", ["nghttp", "-t", "10", f"{base}/x"], lambda done: "Timeout" not in done.stdout + done.stderr


main()
