"""Holds the gate against clients by the thousand that are idle or slow, and against slowhttptest.

What others see of it: the p99 of their requests beside 10,000 idle and 200 slow connections, and without them, in turns;
the memory that the gate takes for them; and whether it is available all the time that slowhttptest goes on."""

import contextlib
import csv
import pathlib
import resource
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import gate  # noqa: E402
from processes import Server, free_port  # noqa: E402

IDLE, SLOW = 10_000, 200
ROUNDS, SECONDS = 3, 8
# Requests a second of the others, over this many connections, far below what the gate can do.
RATE, OTHERS = 800, 16
# The most that the gate may take, in bytes: at rest, and for each connection that does nothing or little. The README
# allows more than three times as much: buffers of 72 KiB each way and a head.
AT_REST, EACH = 64 << 20, 64 << 10
# What the README allows for each connection of an attack: that, and 256 KiB three times over of the upstream's answer.
ATTACKED_EACH = (2 * 72 + 64 + 3 * 256) << 10
# How often as slow as usual the others' p99 may be; and below this many milliseconds there is only noise.
FACTOR, NOISE = 2.0, 2.0

# (mode of slowhttptest, what it is, its options)
MODES = [
    ("H", "slow headers", ["-i", "5", "-x", "24"]),
    ("B", "slow bodies", ["-i", "5", "-s", "8192", "-x", "10"]),
    ("X", "slow readers", ["-w", "512", "-y", "1024", "-n", "5", "-z", "32", "-k", "3"]),
]
ATTACK_CONNECTIONS, ATTACK_SECONDS = 1000, 20
# For so many seconds it may look unavailable: on two cores the attack itself, the others and the upstream run too.
MISSED = 2

NGINX = """
daemon off; worker_processes 1; pid {work}/pid; error_log {work}/error.log;
events {{ worker_connections 8192; }}
http {{
    access_log off; keepalive_requests 100000000;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{ return 200 "ok"; }}
        location /large {{ alias {work}/large; }}
    }}
}}
"""


def main():
    work = pathlib.Path(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < IDLE + SLOW + 1000:
        sys.exit(f"hardness.py: {hard} open files are too few: ulimit -Hn must be {IDLE + SLOW + 1000} or more")
    wrong = []
    with upstream(work) as url, gate.started(work, "hardness", url) as running:
        crowd(work, running, wrong)
    with upstream(work) as url, gate.started(work, "slowhttptest", url) as running:
        for mode in MODES:
            attack(work, running, mode, wrong)
    for what in wrong:
        print(f"tests/conformance/run: {what}")
    sys.exit(1 if wrong else 0)


@contextlib.contextmanager
def upstream(work):
    """nginx, which answers at once."""
    directory = work / "nginx-upstream"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "large").write_bytes(b"x" * (8 << 20))
    port = free_port()
    conf = directory / "nginx.conf"
    conf.write_text(NGINX.format(work=directory, port=port))
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    server = Server("nginx", [nginx, "-c", conf, "-p", directory, "-e", directory / "error.log"], directory / "log", [port])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def crowd(work, running, wrong):
    """The others' p99 without and with the crowd, in turns."""
    usual, crowded, memory = [], [], []
    p99(work, running, 2, wrong, "nothing")
    at_rest, _ = running.memory()
    for _ in range(ROUNDS):
        usual.append(p99(work, running, SECONDS, wrong, "nothing"))
        with Crowd(running.port) as others:
            crowded.append(p99(work, running, SECONDS, wrong, "the crowd"))
            here = others.standing()
            memory.append(running.memory()[0])
        if here < IDLE + SLOW:
            wrong.append(f"only {here} of {IDLE + SLOW} connections stood to the end")
    before, beside = statistics.median(usual), statistics.median(crowded)
    most, bound = max(memory), AT_REST + EACH * (IDLE + SLOW)
    print(
        f"tests/conformance/run: {RATE} requests/s of others, p99 of {ROUNDS} rounds: usually {figures(usual)} ms, beside "
        f"{IDLE} idle and {SLOW} slow connections {figures(crowded)} ms, {beside / before:.2f} times as much (medians)"
    )
    print(
        f"tests/conformance/run: the gate's memory: {at_rest >> 20} MiB before, {most >> 20} MiB beside them, "
        f"{(most - at_rest) / (IDLE + SLOW) / 1024:.1f} KiB for each; the bound is {bound >> 20} MiB"
    )
    if beside > max(FACTOR * before, NOISE):
        wrong.append(f"p99 beside the crowd is {beside:.2f} ms, {beside / before:.2f} times the usual {before:.2f} ms")
    if most > bound:
        wrong.append(f"the gate takes {most >> 20} MiB, and may take {bound >> 20} MiB")


def figures(values):
    return ", ".join(f"{value:.2f}" for value in values)


def p99(work, running, seconds, wrong, beside):
    """p99 in milliseconds of requests at a fixed rate; every answer must be 200."""
    log = work / "h2load.log"
    log.unlink(missing_ok=True)
    command = [
        "h2load", "--h1", "-c", str(OTHERS), "-D", str(seconds), f"--rps={RATE // OTHERS}", f"--log-file={log}",
        f"http://127.0.0.1:{running.port}/others",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 60)
    rows = [line.split() for line in log.read_text().splitlines()]
    bad = [row for row in rows if row[1] != "200"]
    if done.returncode != 0 or len(rows) < RATE * seconds / 2:
        sys.exit(f"hardness.py: {len(rows)} answers:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    if bad:
        wrong.append(f"beside {beside}, {len(bad)} of {len(rows)} requests of others were not answered 200")
    times = sorted(int(row[2]) / 1000 for row in rows)
    return times[len(times) * 99 // 100]


class Crowd:
    """Connections that do nothing, and some that send a byte a second: heads and bodies. What the gate closes for its
    slowness comes again."""

    def __init__(self, port):
        self.port, self.stop, self.idle, self.slow = port, threading.Event(), [], []

    def __enter__(self):
        for nth in range(IDLE):
            client = socket.create_connection(("127.0.0.1", self.port), timeout=10)
            if nth % 2:
                # It has had an answer, and waits before the next request.
                client.sendall(b"GET /idle HTTP/1.1\r\nHost: a\r\n\r\n")
            self.idle.append(client)
        for client in self.idle[1::2]:
            answer = client.recv(4096)
            if not answer.startswith(b"HTTP/1.1 200"):
                sys.exit(f"hardness.py: an idle client got {answer[:100]!r}")
        self.slow = [self.slow_one(nth) for nth in range(SLOW)]
        self.thread = threading.Thread(target=self.dribble, daemon=True)
        self.thread.start()
        return self

    def slow_one(self, nth):
        client = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        head = b"POST /slow HTTP/1.1\r\nHost: a\r\n"
        if nth % 2:
            head += b"Idempotency-Key: slow-%d\r\nContent-Length: 100000\r\n\r\n" % nth
        client.sendall(head)
        return client

    def dribble(self):
        while not self.stop.wait(1):
            for nth, client in enumerate(self.slow):
                try:
                    client.sendall(b"x")
                except OSError:
                    client.close()
                    self.slow[nth] = self.slow_one(nth)

    def standing(self):
        """How many connections the gate has not closed."""
        closed = 0
        with selectors.DefaultSelector() as selector:
            for client in self.idle:
                selector.register(client, selectors.EVENT_READ)
            closed = len(selector.select(0))
        return IDLE - closed + len(self.slow)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        for client in self.idle + self.slow:
            client.close()


def attack(work, running, mode, wrong):
    """slowhttptest in one mode, with the others going on meanwhile."""
    letter, what, options = mode
    prefix = work / f"slowhttptest-{letter}"
    path = "/large" if letter == "X" else "/attacked"
    command = [
        "slowhttptest", f"-{letter}", "-c", str(ATTACK_CONNECTIONS), "-r", "500", "-l", str(ATTACK_SECONDS), "-p", "3",
        "-u", f"http://127.0.0.1:{running.port}{path}", "-g", "-o", str(prefix), *options,
    ]
    with open(work / f"slowhttptest-{letter}.log", "w") as log:
        attacking = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            others = p99(work, running, ATTACK_SECONDS - 5, wrong, f"slowhttptest -{letter}")
            attacking.wait(ATTACK_SECONDS + 60)
        finally:
            attacking.kill()
    rows = list(csv.DictReader(prefix.with_suffix(".csv").open()))
    name = next(name for name in rows[0] if "Available" in name)
    connected = max(int(row["Connected"]) for row in rows)
    unavailable = sum(int(row[name]) == 0 for row in rows)
    print(
        f"tests/conformance/run: slowhttptest -{letter} ({what}), {connected} connections for {ATTACK_SECONDS} s: available "
        f"in {len(rows) - unavailable} of {len(rows)} seconds; p99 of others {others:.2f} ms; the gate takes "
        f"{running.memory()[0] >> 20} MiB"
    )
    if unavailable > MISSED or int(rows[-1][name]) == 0 or not running.alive():
        wrong.append(f"slowhttptest -{letter}: not available for {unavailable} s, in the end {rows[-1][name] != '0'}")
    memory = running.memory()[0]
    if memory > AT_REST + ATTACKED_EACH * ATTACK_CONNECTIONS:
        wrong.append(f"slowhttptest -{letter}: the gate takes {memory >> 20} MiB")
    if connected < ATTACK_CONNECTIONS / 2:
        wrong.append(f"slowhttptest -{letter}: only {connected} connections")


main()
