#!/usr/bin/env python3
"""A toy payment API, for trying oncegate: every POST charges, and GET tells how often that happened.

    python3 deploy/examples/payments.py [PORT [SECONDS]]

SECONDS is how long a charge takes. It knows nothing of idempotency keys: sent twice, a request charges twice.
"""
import itertools
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

charges = []
try:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0
except ValueError:
    sys.exit(__doc__)
ids = itertools.count(1)


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        charge = {"id": f"ch_{next(ids)}", "request": body.decode("utf-8", "replace")}
        charges.append(charge)
        time.sleep(seconds)
        self.answer(201, charge)

    def do_GET(self):
        self.answer(200, {"charges": len(charges)})

    def answer(self, status, document):
        body = (json.dumps(document) + "\n").encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            # Whoever asked is gone. The charge stands.
            self.close_connection = True

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Payments)
    except OSError as error:
        sys.exit(f"payments.py: cannot listen on 127.0.0.1:{port}: {error.strerror}; give another port")
    print(f"payments on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
