"""schemathesis against the admin API: whatever its document (OpenAPI) allows is taken, whatever it does not allow is refused, and
every answer is as it says."""

import http.client
import http.server
import pathlib
import subprocess
import sys
import threading

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gate  # noqa: E402

# So many requests for each operation. 1,500 take about ten minutes.
EXAMPLES = 1500

ROUTES = """
[[routes]]
name = "charges"
path = "/v1/charges"
[[routes]]
name = "later"
path = "/v1/later"
mode = "accept"
"""


class Upstream(http.server.BaseHTTPRequestHandler):
    """Answers every request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(201)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def main(work):
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    with gate.started(work, "api", f"http://127.0.0.1:{upstream.server_port}", routes=ROUTES) as started:
        # So that there is something to list.
        for nth in range(20):
            client = http.client.HTTPConnection("127.0.0.1", started.port, timeout=20)
            path = ["/v1/charges", "/v1/later"][nth % 2]
            client.request("POST", path, "{}", {"Idempotency-Key": f"key-{nth}", "Content-Type": "application/json"})
            status = client.getresponse().status
            client.close()
            if status not in (201, 202):
                sys.exit(f"tests/conformance/api.py: {path} answers {status}")
        program = pathlib.Path(work) / "api" / "bin" / "schemathesis"
        document = f"http://127.0.0.1:{started.admin}/api/v1/openapi.json"
        ended = subprocess.run(
            [program, "run", document, "--max-examples", str(EXAMPLES), "--generation-database", "none"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=work,
        )
        said = [line.strip() for line in ended.stdout.splitlines() if "generated," in line]
        if ended.returncode != 0 or not said:
            sys.exit(f"{ended.stdout}\ntests/conformance/api.py: the API is not as its document says")
        if not started.alive():
            sys.exit(f"tests/conformance/api.py: the gate ended:\n{started.tail()}")
    print(f"admin API: {said[-1]}, by {gate.said_by(program, '--version')}")


if __name__ == "__main__":
    main(sys.argv[1])
