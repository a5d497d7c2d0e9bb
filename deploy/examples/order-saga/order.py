#!/usr/bin/env python3
"""Runs an order through its saga: reserve, charge, ship. If a step is refused, it undoes those before.

    python3 order.py ORDER_ID TO AMOUNT [GATE_URL]...

It keeps no state. If it is killed, run it again with the same id: steps that have run are answered from their records, so that it
takes the same way and goes on where it was.
"""
import http.client
import json
import sys
import time
from urllib.parse import urlsplit

SAGA = [("stock", "reserve", "cancel"), ("payments", "charge", "refund"), ("shipping", "ship", None)]
# Longer than the upstream's timeout in gate.toml.
PATIENCE = 30


def run(order_id, order, gates):
    done = []
    for service, step, undo in SAGA:
        if call(order_id, service, step, order, gates) == "refused":
            for service, undo in reversed(done):
                call(order_id, service, undo, order, gates)
            return "cancelled"
        done.append((service, undo))
    return "shipped"


def call(order_id, service, step, order, gates):
    """Sends a step until its outcome is known. The same saga and step are the same key, so that it runs once."""
    headers = {"X-Saga-Id": order_id, "X-Step": step, "Content-Type": "application/json"}
    while True:
        pause = 0.1
        try:
            gate = http.client.HTTPConnection(urlsplit(gates[0]).netloc, timeout=PATIENCE)
            gate.request("POST", f"/{service}/{step}", json.dumps(order), headers)
            answer = gate.getresponse()
            body = answer.read()
            if answer.status == 200:
                return json.loads(body)["state"]
            if answer.status in (400, 404, 422):
                sys.exit(f"{step}: {answer.status} {body.decode()}")
            # 409, 502, 503 and 504: it runs, or its outcome is not known yet, or it has not run.
            pause = int(answer.getheader("Retry-After", 0)) or pause
        except (OSError, http.client.HTTPException):
            # This gate is away. Another one on the same store knows what it did.
            gates.append(gates.pop(0))
        time.sleep(pause)


if len(sys.argv) < 4:
    sys.exit(__doc__)
print(sys.argv[1], run(sys.argv[1], {"to": sys.argv[2], "amount": int(sys.argv[3])}, sys.argv[4:] or ["http://127.0.0.1:8080"]))
