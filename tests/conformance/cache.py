"""Runs the public HTTP cache tests (http-cache-tests) against their own server, and against the gate in front of it.

The gate is no cache: without keys it must give what the server alone gives. Each difference that is there for a reason
stands in EXPLAINED, with the reason; any other, and any that is gone, fails."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import gate  # noqa: E402
from processes import Server, free_port  # noqa: E402

SURPLUS = "the server sends more than its Content-Length says: the client stumbles over the rest, which the gate keeps back"
CODING = "the server sends an unknown Transfer-Encoding: the gate refuses it with 502 (RFC 9112, 6.1)"
HANG_UP = "the server closes without an answer: the client sees that itself, or 502 from the gate"

# Test, and why the gate gives another result than the server alone.
EXPLAINED = {
    "304-etag-update-response-Content-Length": SURPLUS,
    "headers-store-Content-Length": SURPLUS,
    "headers-store-Transfer-Encoding": CODING,
    "stale-close": HANG_UP,
    "stale-close-must-revalidate": HANG_UP,
    "stale-close-no-cache": HANG_UP,
    "stale-close-proxy-revalidate": HANG_UP,
    "stale-close-s-maxage=2": HANG_UP,
    "stale-sie-503": HANG_UP,
    "stale-sie-close": HANG_UP,
    "stale-warning-become": HANG_UP,
    "stale-warning-stored": HANG_UP,
}


def main():
    work = pathlib.Path(sys.argv[1])
    package = work / "node_modules" / "http-cache-tests"
    logs = work / "cache"
    logs.mkdir(exist_ok=True)
    results = {}
    for name in ("alone", "gate"):
        port = free_port()
        environment = {
            **os.environ,
            "npm_config_protocol": "http",
            "npm_config_port": str(port),
            "npm_config_pidfile": str(logs / f"{name}.pid"),
        }
        command = ["node", "server/server.mjs"]
        server = Server("the tests' server", command, logs / f"{name}.log", [port], environment, cwd=package)
        try:
            if name == "alone":
                results[name] = run(package, f"http://127.0.0.1:{port}")
            else:
                with gate.started(work, "cache", f"http://127.0.0.1:{port}") as running:
                    results[name] = run(package, f"http://127.0.0.1:{running.port}")
        finally:
            server.stop()
        (logs / f"{name}.json").write_text(json.dumps(results[name], indent=1))
    sys.exit(judge(results["alone"], results["gate"]))


def run(package, base):
    environment = {**os.environ, "npm_config_base": base, "npm_package_config_id": ""}
    command = ["node", "--no-warnings", "cli.mjs"]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=package, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0 or not done.stdout.lstrip().startswith("{"):
        sys.exit(f"cache.py: the tests failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(f"against {base}: {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(done.stdout)


def judge(alone, behind):
    """Counts, and every difference."""
    different = sorted(test for test in alone if said(alone[test]) != said(behind.get(test)))
    wrong = len(alone.keys() ^ behind.keys())
    for test in different:
        why = EXPLAINED.get(test)
        print(f"{test}: {said(alone[test])!r} alone, {said(behind.get(test))!r} behind the gate: {why or 'NOT EXPLAINED'}")
        wrong += why is None
    for test in sorted(set(EXPLAINED) - set(different)):
        print(f"{test}: explained as different, and it is not")
        wrong += 1
    passed = [sum(result is True for result in results.values()) for results in (alone, behind)]
    print(
        f"tests/conformance/run: {len(alone)} cache tests: {passed[0]} pass against the server alone, {passed[1]} behind "
        f"the gate; {len(different)} results differ, {wrong} of them for no known reason"
    )
    return 1 if wrong else 0


def said(result):
    """The result without what is another one in every run: addresses, and the time in a Date."""
    if result is True or result is None:
        return result
    text = re.sub(r"http://\S+", "URL", ": ".join(result))
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UUID", text)
    return re.sub(r"\w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT", "DATE", text)


main()
