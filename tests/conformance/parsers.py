"""Feeds what the gate forwarded to llhttp, h11 and nginx, each as a server, and compares what they read.

Behind each request stands another one, the probe: where a parser sees anything but the request and the probe, they do
not agree on where it ends."""

import base64
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading

import h11

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

from processes import Server, free_port  # noqa: E402

PROBE = "/the-probe-behind-it"
PROBE_BYTES = f"GET {PROBE} HTTP/1.1\r\nHost: probe\r\n\r\n".encode()

# What nginx says for itself to the server behind it, and trailers, which it drops.
OF_NGINX = {b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"expect"}


class Read:
    """A request as a parser read it."""

    def __init__(self, method, target, fields, body, trailers):
        self.method, self.target, self.body = method, target, body
        self.fields = [(name.lower(), value) for name, value in fields]
        self.trailers = [(name.lower(), value) for name, value in trailers]

    def whole(self):
        return self.method, self.target, self.fields, self.body, self.trailers

    def as_nginx_can_say(self):
        fields = [(name, value) for name, value in self.fields if name not in OF_NGINX]
        return self.method, self.target, sorted(fields), self.body


class Refused:
    """A parser refused it."""

    def __init__(self, why):
        self.why = why


def main():
    work = pathlib.Path(sys.argv[1])
    cases = load(work / "forwarded")
    if not cases:
        sys.exit("parsers.py: nothing was forwarded")
    requests = work / "requests.jsonl"
    requests.write_text("".join(json.dumps({"bytes": base64.b64encode(case["raw"]).decode()}) + "\n" for case in cases))
    llhttp_version, methods, by_llhttp = llhttp(requests)
    by_h11 = [read_by_h11(case["raw"]) for case in cases]
    nginx_version, by_nginx = nginx(work / "nginx", cases)
    differences, refusals = [], []
    for case, *reads in zip(cases, by_llhttp, by_h11, by_nginx):
        compare(case, dict(zip(("llhttp", "h11", "nginx"), reads)), methods, differences, refusals)
    for difference in differences:
        print(difference)
    for refusal in sorted(set(refusals)):
        print(f"refused, as it may: {refusal}")
    themes = len({case["case"] for case in cases})
    print(
        f"tests/conformance/run: {len(cases)} requests of {themes} cases that were forwarded, read by llhttp "
        f"{llhttp_version}, h11 {h11.__version__} and nginx {nginx_version}: {len(differences)} differences, "
        f"{len(refusals)} refused as they may be"
    )
    sys.exit(1 if differences else 0)


def load(directory):
    cases = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            case = json.loads(line)
            case["raw"] = base64.b64decode(case["bytes"])
            cases.append(case)
    return cases


def compare(case, reads, methods, differences, refusals):
    name = f"{case['case']} ({case['manner']}, request {case['nth'] + 1})"
    read = {}
    for parser, requests in reads.items():
        if isinstance(requests, Refused):
            method, target = case["raw"].split(b" ", 2)[:2]
            if may_refuse(parser, method.decode(), target.decode(), methods):
                refusals.append(f"{parser}: {method.decode()} {target.decode()}")
            else:
                differences.append(f"{name}: {parser} refuses it: {requests.why}")
        elif len(requests) != 2 or requests[1].target != PROBE.encode():
            seen = [(request.method, request.target) for request in requests]
            differences.append(f"{name}: {parser} reads {seen}")
        else:
            read[parser] = requests[0]
    if "h11" not in read:
        return
    for parser, request in read.items():
        ours = request.as_nginx_can_say() if parser == "nginx" else request.whole()
        theirs = read["h11"].as_nginx_can_say() if parser == "nginx" else read["h11"].whole()
        if ours != theirs:
            differences.append(f"{name}: {parser} reads {ours}, h11 {theirs}")


def may_refuse(parser, method, target, methods):
    """What a parser refuses of all that HTTP has: it then does nothing with it, which is no other reading."""
    if parser == "llhttp":
        return method not in methods
    # nginx knows methods of capital letters only, answers TRACE itself and has no target but a path.
    return parser == "nginx" and (not re.fullmatch("[A-Z_-]+", method) or method == "TRACE" or target == "*")


def read_by_h11(raw):
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(raw + PROBE_BYTES)
    requests = []
    try:
        while len(requests) < 3:
            request, body, trailers = None, b"", []
            while True:
                event = connection.next_event()
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    trailers = list(event.headers.raw_items())
                    break
                else:
                    return requests if request is None else Refused(f"it wants more: {event}")
            fields = request.headers.raw_items()
            requests.append(Read(request.method, request.target, fields, body, trailers))
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except h11.ProtocolError as error:
        return Refused(str(error))
    return requests


def llhttp(requests):
    command = ["node", str(HERE / "llhttp.js"), str(requests), PROBE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"parsers.py: node failed:\n{done.stderr}")
    head, *lines = map(json.loads, done.stdout.strip().split("\n"))
    reads = []
    for line in lines:
        if line["error"]:
            reads.append(Refused(line["error"]))
            continue
        found = []
        for request in line["requests"]:
            fields, trailers = pairs(request["fields"]), pairs(request["trailers"])
            body = base64.b64decode(request["body"])
            found.append(Read(latin(request["method"]), latin(request["target"]), fields, body, trailers))
        reads.append(found)
    return head["llhttp"], set(head["methods"]), reads


def latin(text):
    return text.encode("latin-1")


def pairs(flat):
    return [(latin(name), latin(value)) for name, value in zip(flat[::2], flat[1::2])]


CONF = """
{user} daemon off; worker_processes 1; pid {work}/pid; error_log {work}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; underscores_in_headers on; ignore_invalid_headers off; merge_slashes off;
    large_client_header_buffers 8 256k; client_header_buffer_size 256k; client_max_body_size 0;
    keepalive_requests 1000000;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{behind}; proxy_http_version 1.1;
            proxy_set_header Host $http_host; proxy_set_header TE $http_te; proxy_set_header Upgrade $http_upgrade;
        }}
    }}
}}
"""


def nginx(work, cases):
    """What a server behind nginx gets: nginx shows what it read by what it says on."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    behind = Behind()
    port = free_port()
    conf = work / "nginx.conf"
    # A worker of another user may not reach the directory.
    user = "user root;" if os.geteuid() == 0 else ""
    conf.write_text(CONF.format(user=user, work=work, port=port, behind=behind.port))
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    version = subprocess.run([nginx, "-v"], capture_output=True, text=True).stderr.rpartition("/")[2].strip()
    server = Server("nginx", [nginx, "-c", conf, "-p", work, "-e", work / "error.log"], work / "log", [port])
    try:
        return version, [read_by_nginx(port, behind, case["raw"]) for case in cases]
    finally:
        server.stop()


def read_by_nginx(port, behind, raw):
    behind.seen.clear()
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(raw + PROBE_BYTES)
        # The last answer is the probe's, unless nginx refuses and closes.
        while PROBE.encode() not in got:
            try:
                more = client.recv(65536)
            except TimeoutError:
                return Refused(f"it waits; it has said {got[:200]!r}")
            if not more:
                break
            got += more
    seen = list(behind.seen)
    if PROBE.encode() not in got:
        return Refused(f"{got[:100]!r} after {len(seen)} requests")
    return seen


class Behind:
    """The server behind nginx: keeps what it gets, and says which target it was asked for."""

    def __init__(self):
        self.seen = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.socket.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client, client.makefile("rb") as stream:
            method, target, _ = stream.readline().split(b" ")
            fields = []
            while (line := stream.readline()) not in (b"\r\n", b""):
                name, value = line.split(b":", 1)
                fields.append((name, value.strip(b" \t\r\n")))
            length = int(dict((name.lower(), value) for name, value in fields).get(b"content-length", 0))
            body = stream.read(length)
            self.seen.append(Read(method, target, fields, body, []))
            said = b"" if method == b"HEAD" else target
            client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(target), said))


main()
