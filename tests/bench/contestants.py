"""What is measured, and the upstream behind it."""

import http.client
import os
import pathlib
import shutil
import socket
import subprocess
import threading

from processes import Failed, Server, free_port

BODY = '{"id":"ch_1QyT5k2eZvKYlo2C","object":"charge","amount":1000,"currency":"eur","status":"succeeded"}'

# One path for requests that pass through and one for those that are protected, equally long.
PASS_PATH, PROTECTED_PATH, HANGING_PATH = "/v0/charges", "/v1/charges", "/v2/charges"

NO_PROXY = "upstream alone"

NGINX_HEAD = """
worker_processes 1;
daemon off;
{user}
pid {directory}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    server_tokens off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    keepalive_requests 1000000000;
"""

NGINX_UPSTREAM = NGINX_HEAD + """
    default_type application/json;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            add_header Location /v1/charges/ch_1QyT5k2eZvKYlo2C always;
            add_header Cache-Control no-store always;
            add_header X-Request-Id req_8f2b1c4d always;
            return 201 '{body}';
        }}
    }}
    server {{
        listen 127.0.0.1:{status_port};
        location / {{ stub_status; }}
    }}
}}
"""

NGINX_PROXY = NGINX_HEAD + """
    upstream app {{
        server 127.0.0.1:{upstream_port};
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://app;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
        }}
    }}
}}
"""

HAPROXY = """
global
    nbthread 1
    maxconn 8192
defaults
    mode http
    no log
    maxconn 8192
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend clients
    bind 127.0.0.1:{port} backlog 4096
    default_backend app
backend app
    server app 127.0.0.1:{upstream_port} maxconn 8192
"""

ONCEGATE = """
[server]
listen = "127.0.0.1:{port}"
drain_timeout = "1s"

[admin]
listen = "127.0.0.1:{admin_port}"

[store]
url = "{store}"
{settings}

[upstreams]
app = {{ url = "http://127.0.0.1:{upstream_port}", timeout = "20s" }}
hanging = {{ url = "http://127.0.0.1:{hanging_port}", timeout = "24h" }}

[defaults]
ttl = "{ttl}"

[[routes]]
name = "pass"
path = "{pass_path}"
upstream = "app"
mode = "pass"

[[routes]]
name = "charges"
path = "{protected_path}"
upstream = "app"

[[routes]]
name = "hanging"
path = "{hanging_path}"
upstream = "hanging"
ttl = "7d"

[log]
level = "warn"
"""


class Upstream:
    """An nginx that answers every request at once, and counts them."""

    def __init__(self, directory):
        directory.mkdir()
        self.port, self.status_port = free_port(), free_port()
        self.polls = 0
        text = NGINX_UPSTREAM.format(
            directory=directory, user=nginx_user(), port=self.port, status_port=self.status_port, body=BODY
        )
        self.server = start_nginx("the upstream", directory, text, [self.port, self.status_port])

    def executions(self):
        """How many requests it has answered, but for those that asked for this number."""
        connection = http.client.HTTPConnection("127.0.0.1", self.status_port, timeout=10)
        connection.request("GET", "/")
        requests = int(connection.getresponse().read().split()[9])
        connection.close()
        self.polls += 1
        return requests - self.polls

    def stop(self):
        self.server.stop()


class HangingUpstream:
    """Takes requests and never answers, until it is stopped."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                self.connections.append(self.listener.accept()[0])
            except OSError:
                return

    def stop(self):
        self.listener.close()
        for connection in self.connections:
            connection.close()


class Proxy:
    """nginx or HAProxy: requests pass through."""

    gate = False
    store = None
    executions = None  # how often its own handler ran, where it is an application

    def __init__(self, name, server, port):
        self.name, self.server, self.port = name, server, port
        self.idle = 0  # bytes of memory before the first request; asked for when all have started

    def stop(self):
        self.server.stop()


class Oncegate(Proxy):
    """A build of oncegate on one store."""

    gate = True

    def __init__(self, label, binary, store, directory, upstream, hanging, ttl="24h"):
        self.label, self.store, self.directory = label, store, directory
        port, self.admin_port = free_port(), free_port()
        config = directory / "oncegate.toml"
        config.write_text(
            ONCEGATE.format(
                port=port, admin_port=self.admin_port, store=store.url, settings=store.settings, upstream_port=upstream.port,
                hanging_port=hanging.port, ttl=ttl, pass_path=PASS_PATH, protected_path=PROTECTED_PATH,
                hanging_path=HANGING_PATH,
            )
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ONCEGATE_")}
        self.binary, self.environment = binary, environment
        store.prepare(binary, environment)
        super().__init__(label, self._start(port), port)

    def _start(self, port):
        return Server(
            f"{self.label} on {self.store.name}", [self.binary, "serve", "--config", self.directory / "oncegate.toml"],
            self.directory / "log", [port, self.admin_port], self.environment,
        )

    def restart(self):
        """Ends the process and starts another, which has nothing in memory."""
        self.server.stop()
        self.server = self._start(self.port)
        self.idle = self.server.memory()[0]

    def metrics(self):
        """Every sample of /metrics, by its name and labels as they are written."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def outcomes(self, metrics=None):
        """How many requests ended how, over all routes."""
        found = {}
        for name, value in (metrics or self.metrics()).items():
            if name.startswith("oncegate_requests_total{") and value:
                outcome = name.split('outcome="')[1].split('"')[0]
                found[outcome] = found.get(outcome, 0) + int(value)
        return found

    def stop(self):
        self.server.stop()
        self.store.stop()


class Application(Proxy):
    """An Express application on PostgreSQL that does without a gate: with a middleware of its own."""

    def __init__(self, program, store, directory):
        port, self.runs_port = free_port(), free_port()
        self.store = store
        command = ["node", program / "application.js", port, self.runs_port, store.url]
        super().__init__("Express with a middleware", Server("Express", command, directory / "log", [port, self.runs_port]), port)

    def executions(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.runs_port, timeout=10)
        connection.request("GET", "/")
        runs = int(connection.getresponse().read())
        connection.close()
        return runs

    def stop(self):
        self.server.stop()
        self.store.stop()


def installed_application(target):
    """The application with what it needs, in a directory of its own."""
    source, directory = pathlib.Path(__file__).with_name("middleware"), target / "bench-middleware"
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, directory)
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"], cwd=directory, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise Failed("npm could not install what the Express application needs")
    return directory


def start_nginx(name, directory, text, ports):
    config = directory / "nginx.conf"
    config.write_text(text)
    return Server(
        name, ["nginx", "-e", "stderr", "-p", directory, "-c", config], directory / "log", ports
    )


def nginx_user():
    # A worker of another user could not reach the temporary directory.
    return "user root;" if os.geteuid() == 0 else ""


def nginx_proxy(directory, upstream):
    directory.mkdir()
    port = free_port()
    text = NGINX_PROXY.format(directory=directory, user=nginx_user(), port=port, upstream_port=upstream.port)
    return Proxy("nginx", start_nginx("nginx", directory, text, [port]), port)


def haproxy_proxy(directory, upstream):
    directory.mkdir()
    port = free_port()
    config = directory / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, upstream_port=upstream.port))
    return Proxy("HAProxy", Server("HAProxy", ["haproxy", "-db", "-f", config], directory / "log", [port]), port)


class NoProxy(Proxy):
    """The upstream itself: what the load and the upstream can do without anything between them."""

    def __init__(self, upstream):
        super().__init__(NO_PROXY, upstream.server, upstream.port)

    def stop(self):
        pass
