#!/usr/bin/env python3
"""One of the three services of the order saga: stock, payments or shipping.

    DATABASE_URL=postgresql://USER@HOST/DATABASE python3 service.py stock|payments|shipping [HOST:]PORT

The database is the one that the gates keep their records in. See README.md beside this file.
"""
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import psycopg
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

# What oncegate's functions raise when this attempt is no longer the one that may act.
NOT_CURRENT = "OG001"
STEPS = {"stock": ("reserve", "cancel"), "payments": ("charge", "refund"), "shipping": ("ship",)}
# Nothing here says that a step runs once: a step that ran twice would have two rows.
TABLE = "CREATE TABLE IF NOT EXISTS entry (saga text, step text, state text)"


def refuses(step, order):
    return step == "ship" and order["to"] == "nowhere" or step == "charge" and order["amount"] > 1000


def run(db, attempt, saga, step, order):
    """Runs a step inside the transaction that `db` is in. Returns its answer."""
    if attempt:
        # First of all: from here to the end of the transaction, no other attempt gets this key.
        db.execute("SELECT oncegate.assert_current(%s)", (attempt,))
    state = "refused" if refuses(step, order) else "done"
    db.execute("INSERT INTO entry VALUES (%s, %s, %s)", (saga, step, state))
    answer = encoded({"step": step, "state": state})
    if attempt:
        # Last of all: this is the answer to every retry, once the transaction has committed.
        headers = Jsonb([["Content-Type", "application/json"]])
        db.execute("SELECT oncegate.complete(%s, 200, %s, %s)", (attempt, headers, answer))
    return answer


class Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        saga, step = self.headers["X-Saga-Id"], self.headers["X-Step"]
        if step not in STEPS[name] or self.path != f"/{name}/{step}":
            return self.answer(404, encoded({"error": f"{name} has no step {step}"}))
        try:
            # BEGIN, then COMMIT; ROLLBACK where anything raises.
            with pool.connection() as db, db.transaction():
                answer = run(db, self.headers.get("Idempotency-Attempt"), saga, step, order)
        except psycopg.Error as error:
            if error.sqlstate == NOT_CURRENT:
                return self.answer(409, encoded({"error": "another attempt has taken this step over, or it has its answer"}))
            # Whether it committed may not be known here. The gate finds out: what completed is not released.
            self.log_error("%s", error)
            return self.answer(503, encoded({"error": "the database cannot be reached, or refuses"}))
        self.answer(200, answer)

    def do_GET(self):
        """What the gate asks about an unknown outcome: `/steps/KEY` is the answer of a step that has run, or 404."""
        saga, _, step = unquote(self.path.removeprefix("/steps/")).rpartition(":")
        with pool.connection() as db:
            row = db.execute("SELECT state FROM entry WHERE (saga, step) = (%s, %s)", (saga, step)).fetchone()
        if row:
            self.answer(200, encoded({"step": step, "state": row[0]}))
        else:
            self.answer(404, encoded({"error": "this step has not run"}))

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *args):
        pass


def encoded(document):
    return (json.dumps(document) + "\n").encode()


def serve():
    host, _, port = sys.argv[2].rpartition(":")
    server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Service)
    with pool.connection() as db:
        # The three of them may start at the same time.
        db.execute("SELECT pg_advisory_xact_lock(4711)")
        db.execute(TABLE)
    print(f"{name} on http://{server.server_address[0]}:{server.server_port}", flush=True)
    server.serve_forever()


if len(sys.argv) != 3 or sys.argv[1] not in STEPS or "DATABASE_URL" not in os.environ:
    sys.exit(__doc__)
name = sys.argv[1]
# A key stays in flight while a transaction holds it: one that was left open must not hold it for ever.
pool = ConnectionPool(os.environ["DATABASE_URL"], min_size=1, max_size=10, open=True, kwargs={
    "options": "-c idle_in_transaction_session_timeout=60s"})
if __name__ == "__main__":
    serve()
