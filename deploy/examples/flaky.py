#!/usr/bin/env python3
"""A payment API that fails as real ones do, for trying clients.

    python3 deploy/examples/flaky.py [PORT]

POST /v1/charges with {"order": "slow-1", "amount": 100} charges. The word before the dash says what goes wrong:

    ok        201 at once
    slow      charges, and answers 201 after 2.5 seconds
    busy      503 twice without a charge, then 201
    declined  402 without a charge
    error     charges, and answers 500
    gateway   charges, and answers 502
    reset     charges, and resets the connection

GET /v1/charges shows how often each order was charged. The API knows nothing of idempotency keys.
"""
import collections
import itertools
import json
import socket
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

charges = collections.Counter()
refusals = collections.Counter()
ids = itertools.count(1)


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        order = str(json.loads(body)["order"])
        fault = order.split("-")[0]
        if fault == "busy" and refusals[order] < 2:
            refusals[order] += 1
            return self.answer(503, {"error": "busy"})
        if fault == "declined":
            return self.answer(402, {"error": "card_declined"})
        charge = {"id": f"ch_{next(ids)}", "order": order}
        charges[order] += 1
        if fault == "slow":
            time.sleep(2.5)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        statuses = {"error": 500, "gateway": 502}
        self.answer(statuses.get(fault, 201), charge if fault not in statuses else {"error": "oops"})

    def do_GET(self):
        self.answer(200, charges)

    def answer(self, status, document):
        body = (json.dumps(document) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self):
        try:
            super().handle()
        except (OSError, ValueError):
            pass  # The connection was reset, as announced.

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    try:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 3000), Payments)
    except ValueError:
        sys.exit(__doc__)
    except OSError as error:
        sys.exit(f"flaky.py: cannot listen: {error.strerror}; give another port")
    print(f"payments on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
