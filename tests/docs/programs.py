"""The programs that come first on a page's PATH, and what the machine has."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading

from pages import Broken

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

# A gate that names no address listens on the page's ports, not on 8080 and 9090.
GATE = r'''
import os, re, sys, tomllib
REAL = "@ONCEGATE@"
arguments = sys.argv[1:]
command = next((a for a in arguments if not a.startswith("-")), "")

def flag(*names):
    for place, argument in enumerate(arguments):
        for name in names:
            if argument == name:
                return arguments[place + 1] if place + 1 < len(arguments) else None
            if argument.startswith(name + "="):
                return argument[len(name) + 1:]

if command in ("serve", "records", "deliveries", "observed", "audit", "health", "reload"):
    written = {}
    file = flag("--config", "-c") or os.environ.get("ONCEGATE_CONFIG")
    try:
        with open(file or "/dev/null", "rb") as opened:
            written = tomllib.load(opened)
    except (OSError, ValueError):
        pass
    listeners = []
    for name, option, port in (("server", "--listen", "8080"), ("admin", "--admin", "9090")):
        variable = f"ONCEGATE_{name.upper()}__LISTEN"
        listen = flag(option) or os.environ.get(variable) or written.get(name, {}).get("listen")
        if not listen:
            listen = "127.0.0.1:" + os.environ["DOCS_PORT_" + port]
            os.environ[variable] = listen
        listeners += listen if isinstance(listen, list) else [listen]
    if command == "serve":
        ports = [p for listen in listeners for p in re.findall(r":(\d+)$", listen)]
        with open(os.environ["DOCS_STARTED"], "a") as started:
            started.write(f"{os.getpid()} {' '.join(ports)}\n")
os.execv(REAL, ["oncegate"] + arguments)
'''

# Stops and starts the page's PostgreSQL, for pages on what a gate does meanwhile.
POSTGRES = r'''#!/bin/bash
set -eu
case ${1-} in
stop)
    pid=$(head -1 "$PGDATA/postmaster.pid")
    kill -INT "$pid"
    while kill -0 "$pid" 2>/dev/null && ! grep -qs "^State:.*Z" "/proc/$pid/status"; do sleep 0.05; done
    rm -f "$PGDATA/postmaster.pid"
    ;;
start)
    server=(postgres -D "$PGDATA")
    [ "$(id -u)" -ne 0 ] || server=(setpriv --reuid=nobody --clear-groups "$(command -v postgres)" -D "$PGDATA")
    "${server[@]}" >/dev/null 2>&1 &
    for _ in $(seq 200); do
        ! psql -qXc "SELECT 1" postgres >/dev/null 2>&1 || exit 0
        sleep 0.1
    done
    exit 1
    ;;
*) exit 2 ;;
esac
'''


class Tools:
    """The programs that come first on PATH, and PostgreSQL's."""

    def __init__(self, oncegate, directory):
        self.oncegate = oncegate
        self.bin = os.path.join(directory, "bin")
        self.directory = directory
        os.mkdir(self.bin)
        os.chmod(directory, 0o755)
        self.script("oncegate", f"#!{sys.executable} -I\n" + GATE.replace("@ONCEGATE@", oncegate or ""))
        # Into a file curl draws a meter that a terminal shows no trace of.
        curl = shutil.which("curl") or "curl"
        self.script("curl", f'#!/bin/sh\nexec {curl} -sS "$@"\n')
        cargo = shutil.which("cargo") or "cargo"
        self.script("cargo", textwrap.dedent(f"""\
            #!/bin/bash
            if [ "${{1-}}" = run ]; then
                while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
                shift
                exec oncegate "$@"
            fi
            exec {cargo} "$@"
            """))
        self.script("docs-postgres", POSTGRES)
        places = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)
        self.path = os.pathsep.join([self.bin, os.environ["PATH"], *places, "/usr/sbin"])
        self.lock = threading.Lock()
        self.cluster = None

    def script(self, name, text):
        path = os.path.join(self.bin, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def lacks(self, needs):
        """What of `needs` this machine has not."""
        programs = {"postgres": "initdb", "redis": "redis-server"}
        modules = {"psycopg": "psycopg, psycopg_pool", "yaml": "yaml", "pip": "pip"}
        lacking = set()
        for need in needs:
            if need in modules:
                if subprocess.run([python_with(modules[need]), "-c", f"import {modules[need]}"], capture_output=True).returncode:
                    lacking.add(need)
            elif need == "mount":
                if not self.may_mount():
                    lacking.add(need)
            elif not shutil.which(programs.get(need, need), path=self.path):
                lacking.add(need)
        return lacking

    def may_mount(self):
        """Whether a small file system can be mounted, to fill it."""
        place = tempfile.mkdtemp(dir=self.directory)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "oncegate-docs", place], capture_output=True).returncode:
            return False
        return not subprocess.run(["umount", place], capture_output=True).returncode

    def template(self):
        """A data directory that is copied for each page. PostgreSQL does not run as root."""
        with self.lock:
            if not self.cluster:
                cluster = os.path.join(self.directory, "cluster")
                os.mkdir(cluster)
                own(cluster)
                command = ["initdb", "-D", cluster, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
                done = subprocess.run(unprivileged(command, self.path), capture_output=True, text=True, cwd="/", env=self.environment())
                if done.returncode:
                    raise Broken("initdb: " + done.stderr)
                self.cluster = cluster
            return self.cluster

    def environment(self):
        return {**os.environ, "PATH": self.path}


def python_with(modules):
    """The python3 of PATH, or Debian's, which has what its packages install."""
    for python in ("python3", "/usr/bin/python3"):
        if not subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode:
            return python
    return "python3"


def own(path):
    if os.getuid() == 0:
        shutil.chown(path, "nobody")


def unprivileged(command, path):
    program = shutil.which(command[0], path=path) or command[0]
    if os.getuid() == 0:
        return ["setpriv", "--reuid=nobody", "--clear-groups", program, *command[1:]]
    return [program, *command[1:]]
