#!/usr/bin/env python3
"""An upstream that answers with what it was sent, for trying the way to it.

    python3 deploy/examples/echo.py [PORT]

The answer has the number of POSTs so far, the path, `Host` and the headers about forwarding.
"""
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHOWN = ("Host", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "Idempotency-Key")
posts = []


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "POST":
            posts.append(self.path)
        lines = {name: ", ".join(self.headers.get_all(name)) for name in SHOWN if name in self.headers}
        body = (json.dumps({"posts": len(posts), "path": self.path, **lines}, indent=2) + "\n").encode()
        self.send_response(201 if self.command == "POST" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    try:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 3000), Echo)
    except ValueError:
        sys.exit(__doc__)
    except OSError as error:
        sys.exit(f"echo.py: cannot listen: {error.strerror}; give another port")
    print(f"echo on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
