"""One measurement: wrk drives a contestant, and what it says is checked against what the contestant and the upstream
say. A figure that is not what it claims to be is reported as a problem."""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import resource
import socket
import subprocess
import threading
import time

from contestants import HANGING_PATH, PASS_PATH, PROTECTED_PATH
from processes import TICKS, Failed, start

SCRIPT = pathlib.Path(__file__).with_name("load.lua")
HOST = "bench.test"
SEEDED = 1000

# For so many seconds new keys come to a gate whose cache hangs, until it has long given it up.
GIVING_UP = 1

# So many times longer than they are asked for, answers are stored that will be asked for once.
WARMING = 8
REQUEST_BODY = '{"amount":1000,"currency":"eur","customer":"cus_8f2b1c","description":"order 4711"}'


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of request, and what must come back."""

    name: str
    path: str
    changes: str
    status: int
    outcome: str


PASS = Kind("pass-through", PASS_PATH, "unique", 201, "passed")
FIXED = Kind("pass-through, fixed", PASS_PATH, "fixed", 201, "passed")
NEW = Kind("new keys", PROTECTED_PATH, "unique", 201, "executed")
REPLAY = Kind("replays", PROTECTED_PATH, "set", 201, "replayed")
COLD = Kind("cold replays", PROTECTED_PATH, "unique", 201, "replayed")
HUNG = Kind("new keys with the cache hung", PROTECTED_PATH, "unique", 201, "executed")
AWAY = Kind("new keys with the cache given up", PROTECTED_PATH, "unique", 201, "executed")
CONFLICT = Kind("conflicts", HANGING_PATH, "fixed", 409, "in-flight")
KINDS = (PASS, FIXED, REPLAY, CONFLICT, NEW, HUNG, AWAY, COLD)
PASSES = (PASS, FIXED)
NEW_KEYS = (NEW, HUNG, AWAY)


@dataclasses.dataclass
class Result:
    """What one measurement found; nothing where that cannot be known. Latencies in milliseconds, memory in bytes."""

    requests: int
    rate: float
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    slowest: float
    cpu: float  # microseconds of the proxy for each request
    store_cpu: float  # and of the servers that its store has; nothing where it has none
    idle: int
    peak: int
    end: int
    load_cpu: float  # microseconds of wrk for each request
    load_share: float  # of a core, that each thread of wrk used
    others: float  # cores that anything else used, or that the host took away
    problems: list


class Load:
    """How measurements are made in this run."""

    def __init__(self, upstream, seconds, threads):
        self.upstream, self.seconds, self.threads = upstream, seconds, threads
        self.runs = 0
        self.tag = f"{int(time.time()):x}"

    def measure(self, contestant, kind, connections):
        """Runs `kind` on a contestant that was started, and prepared by `seed` or `occupy` where it needs that."""
        self.runs += 1
        key = f"{self.tag}-{self.runs:05d}"
        problems = []
        if kind is COLD:
            self._warm_store(contestant, key, connections)
        self._probe(contestant, kind, key + "-before", problems)
        with contextlib.ExitStack() as hung:
            if kind is AWAY:
                hung.enter_context(contestant.store.hung())
                self.drive(contestant.port, kind, key + "-giving-up", connections, GIVING_UP)
            return self._measure(contestant, kind, connections, key, problems)

    def _measure(self, contestant, kind, connections, key, problems):
        executed = self._executions(contestant)
        outcomes = contestant.outcomes() if contestant.gate else {}
        records = contestant.store.completed() if contestant.gate else None
        contestant.server.forget_peak()
        before = self._cpu(contestant)
        with contestant.store.hung() if kind is HUNG else contextlib.nullcontext():
            said = self.drive(contestant.port, kind, key, connections, self.seconds)
        cpu, store_cpu, upstream_cpu, load_cpu, all_cpu = (
            now - then for now, then in zip(self._cpu(contestant), before)
        )
        end, peak = contestant.server.memory()
        self._check(contestant, kind, connections, said, executed, outcomes, records, problems)
        self._probe(contestant, kind, key + "-after", problems)
        if kind is COLD and contestant.store.settings:
            asked = contestant.metrics().get('oncegate_store_duration_seconds_count{op="claim",store="postgres"}', 0)
            if asked > said["requests"] / 100:
                problems.append(f"{asked:.0f} times the store behind the cache was asked")
        seconds = said["microseconds"] / 1e6
        requests = max(said["requests"], 1)
        if contestant.server is self.upstream.server:
            upstream_cpu = 0
        return Result(
            requests=said["requests"], rate=said["requests"] / seconds,
            # The loop is closed: each connection waits for its answer before it asks again.
            mean=connections * seconds / requests * 1e3,
            p50=said["p50"] / 1e3, p90=said["p90"] / 1e3, p99=said["p99"] / 1e3, p999=said["p999"] / 1e3,
            slowest=said["max"] / 1e3, cpu=cpu / requests * 1e6,
            store_cpu=store_cpu / requests * 1e6 if servers_of(contestant) else None,
            idle=contestant.idle, peak=peak, end=end, load_cpu=load_cpu / requests * 1e6,
            load_share=load_cpu / seconds / min(self.threads, connections),
            others=max(all_cpu - cpu - store_cpu - upstream_cpu - load_cpu, 0) / seconds, problems=problems,
        )

    def _executions(self, contestant):
        return contestant.executions() if contestant.executions else self.upstream.executions()

    def _cpu(self, contestant):
        """CPU seconds so far: of the contestant, its store's servers, the upstream, wrk, and everybody."""
        stores = sum(server.cpu_seconds() for server in servers_of(contestant))
        return (
            contestant.server.cpu_seconds(), stores, self.upstream.server.cpu_seconds(), children_cpu(), machine_cpu(),
        )

    def drive(self, port, kind, key, connections, seconds):
        """Runs wrk to its end."""
        with self.start(port, kind, key, connections, seconds) as process:
            try:
                output = process.communicate(timeout=seconds + 60)[0]
            except BaseException:
                process.kill()
                raise
        return result_of(output, process.returncode)

    def start(self, port, kind, key, connections, seconds):
        """Starts wrk with a script that makes the requests of this kind."""
        if kind is REPLAY or kind is CONFLICT:
            key = prepared_key(kind)
        command = [
            "wrk", "-t", str(min(self.threads, connections)), "-c", str(connections), "-d", f"{seconds}s",
            "--timeout", "10s", "-s", str(SCRIPT), f"http://127.0.0.1:{port}", "--",
            kind.changes, kind.path, HOST, key, str(SEEDED),
        ]
        return start(command, subprocess.PIPE, text=True)

    def seed(self, contestant, connections=16):
        """Stores the answers that replays will get."""
        failures = []

        def store(first):
            connection = http.client.HTTPConnection("127.0.0.1", contestant.port, timeout=30)
            for number in range(first, SEEDED, connections):
                found = post(connection, REPLAY.path, f"{prepared_key(REPLAY)}-{number}")
                if found != (201, "executed"):
                    failures.append(found)
                    return
            connection.close()

        threads = [threading.Thread(target=store, args=(first,)) for first in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise Failed(f"{contestant.server.name}: seeding for replays got {failures[0]}")

    def _warm_store(self, contestant, key, connections):
        """Stores more answers than a measurement will ask for, each once, and starts the gate anew."""
        for end in ("-before", "-after"):
            connection = http.client.HTTPConnection("127.0.0.1", contestant.port, timeout=30)
            post(connection, COLD.path, key + end)
            connection.close()
        self.drive(contestant.port, COLD, key, connections, self.seconds * WARMING)
        contestant.restart()

    def occupy(self, contestant):
        """Starts the attempt that never ends; every request with its key is a conflict. Returns its connection."""
        connection = socket.create_connection(("127.0.0.1", contestant.port))
        connection.sendall(
            f"POST {CONFLICT.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(REQUEST_BODY)}\r\nAuthorization: Bearer bench-3f9a2c71d0\r\n"
            f"Idempotency-Key: {prepared_key(CONFLICT)}\r\n\r\n{REQUEST_BODY}".encode()
        )
        deadline = time.monotonic() + 10
        while contestant.metrics().get('oncegate_attempts_in_flight{route="hanging"}') != 1:
            if time.monotonic() > deadline:
                raise Failed(f"{contestant.server.name}: the attempt that conflicts are with did not start")
            time.sleep(0.01)
        return connection

    def _probe(self, contestant, kind, key, problems):
        """One request of the kind, whose status and headers are looked at."""
        key = {REPLAY: prepared_key(REPLAY) + "-7", CONFLICT: prepared_key(CONFLICT)}.get(kind, key)
        connection = http.client.HTTPConnection("127.0.0.1", contestant.port, timeout=30)
        try:
            found = post(connection, kind.path, key)
        except (OSError, http.client.HTTPException) as error:
            found = error
        connection.close()
        expected = (kind.status, None if kind in PASSES else kind.outcome)
        if found != expected:
            problems.append(f"a probe got {found!r}, not {expected}")

    def _check(self, contestant, kind, connections, said, executed, outcomes, records, problems):
        requests = said["requests"]
        if requests == 0:
            problems.append("no request was answered")
        for error in ("connect", "read", "write", "timeout"):
            if said[error]:
                problems.append(f"{said[error]} {error} errors")
        refused = requests if kind.status >= 400 else 0
        if said["status"] != refused:
            problems.append(f"{said['status']} answers were not 2xx or 3xx, where {refused} should be")
        if not contestant.server.alive():
            raise Failed(f"{contestant.server.name} died:\n{contestant.server.tail()}")
        # wrk does not count the requests that its end cuts off, one on each connection; they may still run.
        reaches = kind in (*PASSES, *NEW_KEYS)
        self._within("the upstream ran", lambda: self._executions(contestant) - executed, requests, connections,
                     reaches, problems)
        if contestant.gate:
            def counted(outcome):
                return contestant.outcomes().get(outcome, 0) - outcomes.get(outcome, 0)

            self._within(f"`{kind.outcome}` was counted", lambda: counted(kind.outcome), requests, connections,
                         True, problems)
            if records is not None:
                self._within("a record was completed", lambda: contestant.store.completed() - records, requests,
                             connections, kind in NEW_KEYS, problems)
            others = {name: counted(name) for name in contestant.outcomes() if name != kind.outcome and counted(name)}
            if others:
                problems.append(f"other outcomes were counted: {others}")

    @staticmethod
    def _within(what, count, requests, connections, reaches, problems):
        # Each connection has one request on its way when wrk stops counting, and may send another before it closes.
        low, high = (requests, requests + 2 * connections) if reaches else (0, 0)
        found = count()
        deadline = time.monotonic() + 2
        while not low <= found <= high and time.monotonic() < deadline:
            time.sleep(0.05)
            found = count()
        if not low <= found <= high:
            problems.append(f"{what} {found} times, not {low} to {high}")


def servers_of(contestant):
    """The servers of its store that work for it."""
    return contestant.store.servers if contestant.store else ()


def prepared_key(kind):
    return {"replays": "7d3f0c6e-stored-before", "conflicts": "7d3f0c6e-still-running"}[kind.name]


def post(connection, path, key):
    """(status, Idempotency-Status) of one request, the same as wrk's."""
    connection.request(
        "POST", path, REQUEST_BODY,
        {"Host": HOST, "Content-Type": "application/json", "Authorization": "Bearer bench-3f9a2c71d0",
         "Idempotency-Key": key},
    )
    response = connection.getresponse()
    response.read()
    return response.status, response.headers.get("Idempotency-Status")


def result_of(output, status):
    """What load.lua wrote at its end."""
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT "):])
    raise Failed(f"wrk ended with status {status} and no result:\n{output}")


def machine_cpu():
    """CPU seconds that all cores together have worked, or were kept from it by the host."""
    fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICKS


def children_cpu():
    """CPU seconds of the processes that have ended, which is wrk."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
