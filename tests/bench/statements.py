"""The contestant that is no proxy: pgbench sends the statements that claim and settle, one at a time, each with its own
commit. It is what a program gets that does the same work itself, and waits for nothing else.

It works on the same server as the gate, in a database of its own with the same tables and indexes, and writes as many
bytes. What it sends are plain statements, prepared once, with the plan that the gate's have: they cost less than the
gate's functions do."""

import os
import re
import resource
import subprocess

from load import Result
from postgres import program
from processes import Failed, start

NAME = "pgbench"
KIND = "claim and settle"
DATABASE = "statements"

# A bigint is what pgbench can draw; four of them are an id, and two an attempt. What is always the same stands in the
# statement: so it is read once, and not sent.
SCRIPT = """
\\set a random(0, 9223372036854775806)
\\set b random(0, 9223372036854775806)
INSERT INTO oncegate.record
    (id, attempt, state, claimed_at, lease_until, ttl, unknown_ttl, origin, head)
VALUES (
    int8send(:a) || int8send(:b) || int8send(:b) || int8send(:a), int8send(:b) || int8send(:a), 0,
    (date_part('epoch', clock_timestamp()) * 1000)::bigint,
    (date_part('epoch', clock_timestamp()) * 1000)::bigint + 30000,
    86400000, 2592000000, 1, '\\x{head}'
) ON CONFLICT (id) DO NOTHING RETURNING claimed_at;
UPDATE oncegate.record SET state = 1, expires_at = claimed_at + 86400000, answer = '\\x{answer}'
WHERE id = int8send(:a) || int8send(:b) || int8send(:b) || int8send(:a) AND attempt = int8send(:b) || int8send(:a)
    AND state = 0
RETURNING expires_at;
"""

# The gate's plans are pinned; so are these.
OPTIONS = "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c jit=off"


class Statements:
    """pgbench on the server of a gate's store, after that has records to take the sizes from."""

    def __init__(self, store, binary, environment, directory):
        self.store, self.directory = store, directory
        sizes = store.sql(
            "SELECT avg(octet_length(head))::int || ' ' || avg(octet_length(answer))::int FROM oncegate.record "
            "WHERE state = 1"
        )
        self.head, self.answer = map(int, sizes)
        store.sql(f"CREATE DATABASE {DATABASE}", database="postgres")
        store.prepare(binary, environment, DATABASE)
        self.script = directory / "statements.sql"
        self.script.write_text(SCRIPT.format(head="5a" * self.head, answer="5a" * self.answer))

    def measure(self, clients, seconds):
        """A pair of statements counts as one request; of its latency only the mean is known."""
        before, records = self.store.server.cpu_seconds(), self._completed()
        child = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = pgbench(self.script, self.store.url_of(DATABASE), clients, seconds)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = self.store.server.cpu_seconds() - before
        load_cpu = after.ru_utime + after.ru_stime - child.ru_utime - child.ru_stime
        pairs = number(r"number of transactions actually processed: (\d+)", said)
        rate = number(r"tps = ([\d.]+)", said)
        problems = []
        failed = number(r"number of failed transactions: (\d+)", said)
        if failed:
            problems.append(f"{failed:.0f} transactions failed")
        written = self._completed() - records
        if written != pairs:
            problems.append(f"{written} records were completed, not {pairs:.0f}")
        left = self.store.sql("SELECT count(*) FROM oncegate.record WHERE state <> 1", DATABASE)[0]
        if left != "0":
            problems.append(f"{left} records were claimed and not completed")
        return Result(
            requests=int(pairs), rate=rate, mean=number(r"latency average = ([\d.]+) ms", said),
            p50=None, p90=None, p99=None, p999=None, slowest=None, cpu=0, store_cpu=cpu / max(pairs, 1) * 1e6,
            idle=None, peak=None, end=None, load_cpu=load_cpu / max(pairs, 1) * 1e6, load_share=None, others=None,
            problems=problems,
        )

    def _completed(self):
        return int(self.store.sql("SELECT count(*) FROM oncegate.record WHERE state = 1", DATABASE)[0])


def pgbench(script, url, clients, seconds):
    """Runs pgbench to its end. What it says."""
    command = [
        program("pgbench"), "--no-vacuum", "--protocol", "prepared", "--client", clients,
        "--jobs", min(clients, os.cpu_count()), "--time", seconds, "--file", script, url,
    ]
    with start(command, subprocess.PIPE, text=True, env={**os.environ, "PGOPTIONS": OPTIONS}) as process:
        try:
            output = process.communicate(timeout=seconds + 60)[0]
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise Failed(f"pgbench ended with status {process.returncode}:\n{output[-2000:]}")
    return output


def number(pattern, text):
    found = re.search(pattern, text)
    if not found:
        raise Failed(f"pgbench did not say `{pattern}`:\n{text}")
    return float(found[1])
