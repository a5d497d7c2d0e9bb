"""Clients of other makes: varnishtest (varnishtest/*.vtc, which are both client and upstream), curl, nghttp and h2load."""

import collections
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import certificates  # noqa: E402
import gate  # noqa: E402
from processes import free_port  # noqa: E402


class Echo(http.server.BaseHTTPRequestHandler):
    """An upstream that says what it got."""

    protocol_version = "HTTP/1.1"
    # How often it got each key.
    runs = collections.Counter()

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
        self.runs[names.get("idempotency-key")] += 1
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


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


def by_hand(work):
    server = Server(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    upstream = f"http://127.0.0.1:{server.server_port}"
    shown = certificates.made(work / "certificates")
    held = []
    with gate.started(work, "clients", upstream) as plain, \
            gate.started(work, "clients-tls", upstream, certificates.listener(shown)) as encrypted, \
            tempfile.NamedTemporaryFile() as large:
        large.write(os.urandom(3 << 20))
        large.flush()
        cases = [
            *commands(f"http://127.0.0.1:{plain.port}", large.name),
            *over_tls(f"https://127.0.0.1:{encrypted.port}", shown / "ca.pem", large.name),
            *by_nghttp2("h2c", f"http://127.0.0.1:{plain.port}", large.name),
            *by_nghttp2("TLS", f"https://127.0.0.1:{encrypted.port}", large.name),
        ]
        for name, command, judge in cases:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
            ok = judge(done)
            if not ok:
                print(f"{name}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            held.append((name, ok))
    server.shutdown()
    print(f"tests/conformance/run: curl, nghttp and h2load: {sum(ok for _, ok in held)} of {len(held)} cases hold")
    return held


def curl(*words):
    return ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code} %{num_connects} %{http_version}", *words]


def says(status, *, version=None, **about):
    """The status, the version of HTTP, and what the upstream says that it got; headers by their names."""

    def judge(done):
        body, _, last = done.stdout.rpartition("\n")
        if done.returncode or last.split()[0] != str(status) or version not in (None, last.split()[2]):
            return False
        said = json.loads(body) if about else {}
        headers = about.get("headers", {})
        return all(said["headers"].get(name) == value for name, value in headers.items()) and all(
            said[name] == value for name, value in about.items() if name != "headers"
        )

    return judge


def got(*codes, version=None):
    def judge(done):
        last = done.stdout.rpartition("\n")[2].split()
        return last[0] in codes and version in (None, last[2])

    return judge


def replayed(done):
    return "idempotent-replayed: true" in done.stdout.lower()


def commands(base, large):
    """(name, command, what must hold of it)"""
    key = ["-H", "Idempotency-Key: curl-1", "-d", "amount=1"]
    yield "curl: a key", curl(*key, f"{base}/charges"), says(200, method="POST", body=8)
    yield "curl: a retry", curl(*key, "-D", "-", f"{base}/charges"), replayed
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
    yield "curl: an upgrade to HTTP/2 that is passed over", curl("--http2", f"{base}/x"), says(200, version="1.1", method="GET")
    h2c = ["--http2-prior-knowledge"]
    yield "curl: HTTP/2 at once", curl(*h2c, f"{base}/x"), says(200, version="2", method="GET")
    yield "curl: HTTP/2 at once, a retry", curl(*h2c, *key, "-D", "-", f"{base}/charges"), replayed
    yield "curl: HTTP/2 at once, a path as it is", curl(*h2c, "--path-as-is", f"{base}/a%2Fb//c;d?e=%20"), says(
        200, version="2", target="/a%2Fb//c;d?e=%20"
    )
    yield "curl: HTTP/2 at once, OPTIONS of everything", curl(*h2c, "-X", "OPTIONS", "--request-target", "*", base), says(
        200, version="2", target="*"
    )
    yield "curl: another expectation", curl("-H", "Expect: payment", "-d", "a=1", f"{base}/x"), got("417")
    yield "curl: a head that is too large", curl("-H", f"X-A: {'a' * 70000}", f"{base}/x"), got("431")
    yield "curl: a body that is too large", curl(
        "-H", "Idempotency-Key: curl-3", "-H", "Content-Length: 99000000", "-H", "Expect:", "-X", "POST",
        "--data-binary", f"@{large}", f"{base}/x",
    ), got("413")
    yield "nghttp: an upgrade to HTTP/2", ["nghttp", "-u", "-t", "10", f"{base}/x"], lambda done: "Upgrade" in done.stdout + done.stderr


def over_tls(base, ca, large):
    """The same of curl on an encrypted listener."""

    def h2(*words):
        return curl("--cacert", str(ca), "--http2", *words)

    key = ["-H", "Idempotency-Key: curl-tls-1", "-d", "amount=1"]
    yield "curl: HTTP/2 over TLS", h2(f"{base}/x"), says(200, version="2", method="GET", headers={"x-forwarded-proto": "https"})
    yield "curl: HTTP/2 over TLS, a key", h2(*key, f"{base}/charges"), says(200, version="2", method="POST", body=8)
    yield "curl: HTTP/2 over TLS, a retry", h2(*key, "-D", "-", f"{base}/charges"), replayed
    yield "curl: HTTP/1.1 over TLS, a retry of the same", curl(
        "--cacert", str(ca), "--http1.1", *key, "-D", "-", f"{base}/charges"
    ), replayed
    yield "curl: HTTP/2 over TLS, a large upload", h2("-T", large, f"{base}/up"), says(
        200, version="2", method="PUT", body=3 << 20
    )
    yield "curl: HTTP/2 over TLS, a large upload with a key", h2(
        "-H", "Idempotency-Key: curl-tls-2", "-H", "Expect: 100-continue", "--data-binary", f"@{large}", f"{base}/up"
    ), says(200, version="2", method="POST", body=3 << 20)
    yield "curl: HTTP/2 over TLS, HEAD", h2("-I", f"{base}/x"), got("200", version="2")
    yield "curl: HTTP/2 over TLS 1.2", h2("--tls-max", "1.2", f"{base}/x"), says(200, version="2")
    yield "curl: HTTP/1.1 over TLS", curl("--cacert", str(ca), "--http1.1", f"{base}/x"), says(200, version="1.1")
    yield "curl: TLS without ALPN", curl("--cacert", str(ca), "--no-alpn", f"{base}/x"), says(200, version="1.1")
    yield "curl: another authority", curl("--http2", f"{base}/x"), lambda done: done.returncode == 60
    yield "curl: in the clear to TLS", curl(base.replace("https:", "http:")), got("400")
    # Without a body: this curl takes an answer that comes before the whole body has gone for a broken stream.
    yield "curl: another expectation over HTTP/2", h2("-H", "Expect: payment", f"{base}/x"), got("417", version="2")
    # The largest that its library sends, and 32 bytes a line count with it (RFC 9113, 6.5.2).
    yield "curl: a head that is too large over HTTP/2", h2("-H", f"X-A: {'a' * 65300}", f"{base}/x"), got("431", version="2")
    many = [word for nth in range(120) for word in ("-H", f"X-{nth}: a")]
    yield "curl: too many headers over HTTP/2", h2(*many, f"{base}/x"), got("431", version="2")
    yield "curl: several requests on one connection of HTTP/2", h2(f"{base}/x", f"{base}/y", f"{base}/z"), (
        lambda done: done.returncode == 0 and [done.stdout.count(f"\n200 {new} 2") for new in (1, 0)] == [1, 2]
    )


def by_nghttp2(over, base, large):
    """nghttp and h2load, which speak HTTP/2 by nghttp2."""

    def nghttp(*words):
        return ["nghttp", "-v", "--no-verify-peer", "-t", "20", *words]

    def statuses(*expected):
        return lambda done: done.returncode == 0 and re.findall(r":status: (\d+)", done.stdout) == list(expected)

    def h2load(*words):
        return ["h2load", "-n", "200", "-c", "4", "-m", "20", *words]

    def answered(judge):
        """What must hold of how many answers were of each class, where none is missing."""

        def all_of_them(done):
            classes = re.search(r"(\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", done.stdout)
            return " 0 errored, 0 timeout" in done.stdout and judge(*map(int, classes.groups()))

        return all_of_them

    yield f"nghttp, {over}: three requests at once", nghttp(f"{base}/x", f"{base}/y", f"{base}/z"), statuses("200", "200", "200")
    yield f"nghttp, {over}: an upload", nghttp("-d", large, f"{base}/up"), statuses("200")
    yield f"nghttp, {over}: an upload that waits for 100", nghttp("--expect-continue", "-d", large, f"{base}/up"), statuses("200")
    yield f"nghttp, {over}: an upload with trailers and a key", nghttp(
        "-H", f"idempotency-key: nghttp-{over}", "--trailer", "x-check: 1", "-d", large, f"{base}/up"
    ), statuses("200")
    yield f"nghttp, {over}: HEAD", nghttp("-H", ":method: HEAD", f"{base}/x"), statuses("200")
    yield f"nghttp, {over}: headers by pieces", nghttp("--continuation", f"{base}/x"), statuses("200")
    yield f"nghttp, {over}: padded frames", nghttp("-b", "200", "-d", large, f"{base}/up"), statuses("200")
    yield f"nghttp, {over}: no table of headers", nghttp("-c", "0", f"{base}/x", f"{base}/y"), statuses("200", "200")
    yield f"nghttp, {over}: a window of one byte", nghttp("-w", "1", f"{base}/x"), statuses("200")
    yield f"h2load, {over}: requests", h2load(f"{base}/x"), answered(lambda *of: of == (200, 0, 0, 0))
    yield f"h2load, {over}: uploads", ["h2load", "-n", "12", "-c", "2", "-m", "3", "-d", large, f"{base}/up"], answered(
        lambda *of: of == (12, 0, 0, 0)
    )
    # The others are replays, or 409 while the first runs.
    key = f"h2load-{over}"
    yield f"h2load, {over}: one key two hundred times", h2load(
        "-H", f"idempotency-key: {key}", "-d", __file__, f"{base}/charges"
    ), answered(lambda good, _, refused, bad: good >= 1 and good + refused == 200 and bad == 0 and Echo.runs[key] == 1)


main()
