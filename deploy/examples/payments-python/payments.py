#!/usr/bin/env python3
"""A payment API that settles inside its own transaction: the charge and its answer commit together, or not at all.

    DATABASE_URL=postgresql://USER@HOST/DATABASE python3 payments.py [HOST:]PORT

The database is the one that the gate keeps its records in. See README.md beside this file.
"""
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

# What oncegate's functions raise when this attempt is no longer the one that may act.
NOT_CURRENT = "OG001"
JSON = ("Content-Type", "application/json")


def charge(db, attempt, amount):
    """Charges, inside the transaction that `db` is in. Returns the answer: status, headers and body."""
    if attempt:
        # First of all: from here to the end of the transaction nobody else gets this key.
        db.execute("SELECT oncegate.assert_current(%s)", (attempt,))
    row = db.execute("INSERT INTO charge (amount) VALUES (%s) RETURNING id", (amount,)).fetchone()
    receipt = {"id": f"ch_{row[0]}", "amount": amount}
    status, headers, body = 201, [JSON, ("Location", f"/v1/charges/{row[0]}")], encoded(receipt)
    if attempt:
        # Last of all: this is the answer of the first request and of every retry, once the transaction has committed.
        # If it raises, the charge is rolled back.
        db.execute("SELECT oncegate.complete(%s, %s, %s, %s)", (attempt, status, Jsonb(headers), body))
    return status, headers, body


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is sent whole: its end would wait until its beginning has been acknowledged.
    wbufsize = -1

    def do_POST(self):
        try:
            amount = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["amount"]
            if type(amount) is not int or not 0 < amount < 1_000_000_000:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            self.close_connection = True
            return self.problem(400, 'the body is not of the form {"amount": 100}, or its length is not said')
        # Without the header the request is not protected: it came without a key, or not through the gate.
        attempt = self.headers.get("Idempotency-Attempt")
        try:
            # BEGIN, then COMMIT; ROLLBACK where anything raises.
            with pool.connection() as db, db.transaction():
                answer = charge(db, attempt, amount)
        except psycopg.Error as error:
            if error.sqlstate == NOT_CURRENT:
                return self.problem(409, "another attempt has taken this request over, or it has its answer")
            # Whether it committed may not be known here. The gate finds out: what completed is not released.
            self.log_error("%s", error)
            return self.problem(503, "the database cannot be reached, or refuses")
        self.answer(*answer)

    def do_GET(self):
        with pool.connection() as db:
            count, total = db.execute("SELECT count(*), coalesce(sum(amount), 0)::bigint FROM charge").fetchone()
        self.answer(200, [JSON], encoded({"charges": count, "total": total}))

    def problem(self, status, detail):
        self.answer(status, [JSON], encoded({"error": detail}))

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        # Of this message only: it is not among the headers that are kept.
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *args):
        pass


def encoded(document):
    return (json.dumps(document) + "\n").encode()


def serve():
    host, _, port = sys.argv[1].rpartition(":")
    try:
        server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Payments)
    except (OSError, OverflowError, ValueError) as error:
        sys.exit(f"payments.py: cannot listen on {sys.argv[1]}: {error}")
    try:
        with pool.connection() as db:
            db.execute("CREATE TABLE IF NOT EXISTS charge (id bigint GENERATED ALWAYS AS IDENTITY, amount int NOT NULL)")
    except psycopg.Error as error:
        sys.exit(f"payments.py: the database of DATABASE_URL cannot be used: {error}")
    print(f"payments on http://{server.server_address[0]}:{server.server_port}", flush=True)
    server.serve_forever()


if len(sys.argv) != 2 or "DATABASE_URL" not in os.environ:
    sys.exit(__doc__)
# A key stays in flight while a transaction holds it: one that was left open must not hold it for ever.
pool = ConnectionPool(os.environ["DATABASE_URL"], min_size=1, max_size=10, kwargs={
    "options": "-c idle_in_transaction_session_timeout=60s"})
if __name__ == "__main__":
    serve()
