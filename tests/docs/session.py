"""One page's bash: it runs the blocks, and compares what they print with what the page shows."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
import tomllib

from pages import Broken
from programs import ROOT, python_with, unprivileged

PORTS = ("8080", "8081", "8443", "9090", "9091", "3000", "3001", "5432", "6379", "6380")
PORT = re.compile(r"(?<![\d.])(" + "|".join(PORTS) + r")(?!\d)")
BLOCK_SECONDS = 180
LISTEN_SECONDS = 40
PERHAPS_SECONDS = 10


class Session:
    """One page's bash."""

    def __init__(self, page, tools):
        self.page = page
        self.tools = tools
        self.held = held_ports(len(PORTS))
        self.ports = dict(zip(PORTS, (str(one.getsockname()[1]) for one in self.held)))
        self.box = tempfile.mkdtemp(prefix="docs-", dir=tools.directory)
        os.chmod(self.box, 0o755)
        self.home = os.path.join(self.box, "page")
        self.notes = os.path.join(self.box, "notes")
        os.mkdir(self.home)
        os.mkdir(self.notes)
        for folder in ("deploy", "config"):
            os.mkdir(os.path.join(self.home, folder))
            os.symlink(os.path.join(ROOT, folder, "examples"), os.path.join(self.home, folder, "examples"))
        self.started = os.path.join(self.notes, "started")
        self.servers = []
        self.ran = self.compared = 0
        environment = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("ONCEGATE_", "PG")) and name not in ("CI", "BASH_ENV", "ENV", "CDPATH")
        }
        environment.update(PATH=tools.path, HOME=self.home, TZ="UTC", LC_ALL="C.UTF-8", PYTHONDONTWRITEBYTECODE="1",
                           NO_COLOR="1", DOCS_STARTED=self.started, REPOSITORY=ROOT)
        environment.update({"DOCS_PORT_" + name: port for name, port in self.ports.items()})
        environment.update(self.start_servers(environment))
        self.environment = environment
        self.bash = subprocess.Popen(["bash"], cwd=self.home, env=environment, start_new_session=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.say("set -eu\n")

    def start_servers(self, environment):
        made = {}
        if "psycopg" in self.page.needs and python_with("psycopg, psycopg_pool") != "python3":
            # The python3 that has the packages goes first, for this page only.
            programs = os.path.join(self.notes, "bin")
            os.mkdir(programs)
            os.symlink("/usr/bin/python3", os.path.join(programs, "python3"))
            made["PATH"] = programs + os.pathsep + environment["PATH"]
        if "postgres" in self.page.needs:
            made |= self.start_postgres(environment)
        if "redis" in self.page.needs:
            directory = os.path.join(self.notes, "redis")
            os.mkdir(directory)
            port = self.ports["6379"]
            self.server(["redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", directory, "--appendonly", "yes"], environment)
            listens([port], "redis-server")
        return made

    def start_postgres(self, environment):
        data = os.path.join(self.notes, "postgres")
        subprocess.run(["cp", "-a", self.tools.template(), data], check=True)
        os.chmod(self.notes, 0o755)
        port = self.ports["5432"]
        with open(os.path.join(data, "postgresql.conf"), "a", encoding="utf-8") as file:
            file.write(f"port = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\nmax_connections = 200\n")
        self.server(unprivileged(["postgres", "-D", data], self.tools.path), environment)
        listens([port], "postgres")
        users = {"postgres"}
        databases = {}
        for user, database in re.findall(r"postgres(?:ql)?://([\w-]+)(?::[^@\s/]*)?@(?:127\.0\.0\.1|localhost)(?::5432)?/([\w-]+)", self.page.source):
            databases.setdefault(database, user)
            users.add(user)
        sql = [f'CREATE ROLE "{user}" LOGIN' for user in sorted(users - {"postgres"})]
        if "createdb" not in self.page.source and "CREATE DATABASE" not in self.page.source:
            sql += [f'CREATE DATABASE "{name}" OWNER "{user}"' for name, user in databases.items() if name != "postgres"]
        # As --single runs without a client program, which servers may lack.
        made = {"PGDATA": data, "PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": "postgres"}
        for statement in sql:
            deadline = time.monotonic() + 30
            while True:
                done = subprocess.run(["psql", "-qXc", statement, "postgres"], env={**environment, **made}, capture_output=True, text=True)
                if not done.returncode:
                    break
                if time.monotonic() > deadline or "starting up" not in done.stderr:
                    raise Broken(f"{self.page.name}: {statement}: {done.stderr}")
                time.sleep(0.1)
        return made

    def server(self, command, environment):
        with open(os.path.join(self.notes, "servers.log"), "ab") as log:
            self.servers.append(subprocess.Popen(command, cwd=self.notes, env=environment, stdin=subprocess.DEVNULL,
                                                 stdout=log, stderr=log, start_new_session=True))

    def say(self, text):
        self.bash.stdin.write(text.encode())
        self.bash.stdin.flush()

    def mapped(self, text):
        return PORT.sub(lambda match: self.ports[match.group(1)], text)

    def take(self, block):
        where = f"{self.page.name}:{block.line}"
        text = self.mapped(block.text)
        if "stays" in block.flags:
            text = text.rstrip() + " &\n"
        if "file" in block.options:
            path = os.path.normpath(os.path.join(self.home, block.options["file"]))
            if not path.startswith(self.home + os.sep):
                raise Broken(f"{where}: file= leads out of the session's directory")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            if text.startswith("#!"):
                os.chmod(path, 0o755)
        elif block.language == "sh" and "shown" not in block.flags:
            self.run(block, text, where)
        elif block.language == "toml":
            self.check_toml(block, text, where)
        elif block.language == "json" and "fragment" not in block.flags:
            try:
                json.loads(text)
            except ValueError as error:
                raise Broken(f"{where}: {error}")
        elif block.language == "python" and "fragment" not in block.flags:
            try:
                compile(text, where, "exec")
            except SyntaxError as error:
                raise Broken(f"{where}: {error}")
        elif not block.language:
            raise Broken(f"{where}: a block needs a language; output has `text`")

    def check_toml(self, block, text, where):
        try:
            read = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Broken(f"{where}: {error}")
        if "fragment" in block.flags or not ("upstreams" in read or "routes" in read):
            return
        file = os.path.join(self.notes, "block.toml")
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
        done = subprocess.run([self.tools.oncegate, "check", "--config", file], cwd=self.home, env=self.environment,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise Broken(f"{where}: oncegate check: status {done.returncode}\n{done.stdout}{done.stderr}")
        self.ran += 1

    def run(self, block, text, where):
        self.ran += 1
        script, output = (os.path.join(self.notes, f"{block.line}.{kind}") for kind in ("sh", "out"))
        with open(script, "w", encoding="utf-8") as file:
            file.write(text)
        staying = [line for line in text.replace("\\\n", " ").split("\n") if line.rstrip().endswith(" &")]
        already = self.gates()
        if "exit" in block.options:
            self.say(f"docs_status=0; source {script} >{output} 2>&1 </dev/null || docs_status=$?; echo $docs_status\n")
        else:
            self.say(f"source {script} >{output} 2>&1 </dev/null; echo 0\n")
        status = self.status(where, output)
        if status != block.options.get("exit", "0"):
            raise Broken(f"{where}: exit status {status}\n{text}{indented(printed(output))}")
        if staying:
            self.wait_for_ports(staying, text, where, output, already)
        if not block.output:
            return
        self.compared += 1
        wanted = self.mapped(block.output.text)
        pattern = expectation(block.output.text, "numbers-vary" in block.output.flags, self.ports)
        # A process that stays may be about to print.
        deadline = time.monotonic() + (20 if staying else 2)
        while not pattern.fullmatch(normal(printed(output), "numbers-vary" in block.output.flags)):
            if time.monotonic() > deadline:
                raise Broken(f"{self.page.name}:{block.output.line}: the block before prints something else\n"
                             f"  shown:\n{indented(wanted)}  printed:\n{indented(printed(output))}")
            time.sleep(0.1)

    def status(self, where, output):
        line, deadline = b"", time.monotonic() + BLOCK_SECONDS
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.bash.stdout], [], [], left)[0]:
                raise Broken(f"{where}: still runs after {BLOCK_SECONDS} s\n{indented(printed(output))}")
            more = os.read(self.bash.stdout.fileno(), 1)
            if not more:
                return str(self.bash.wait())
            line += more
        return line.decode().strip()

    def gates(self):
        try:
            with open(self.started, encoding="utf-8") as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []

    def wait_for_ports(self, staying, text, where, output, already):
        """Waits for what the commands listen on, not for what they connect to."""
        deadline = time.monotonic() + LISTEN_SECONDS
        ports, perhaps, pids = set(), set(), []
        clients = {"curl", *re.findall(r"^\s*(\w+)\(\)", self.page.source, re.M)}
        for command in staying:
            if command.split()[0] in clients:
                continue
            named = self.named_ports(command)
            ports |= named
            if not named and "oncegate" not in command:
                perhaps |= self.ports_of_files(command)
        gates = len([command for command in staying if re.search(r"\b(?:oncegate|cargo run)\b.*\bserve\b", command)])
        while len(pids) < gates:
            fresh = [line.split() for line in self.gates()[len(already):]]
            pids = [pid for pid, *_ in fresh]
            ports |= {port for _, *listeners in fresh for port in listeners}
            if time.monotonic() > deadline:
                raise Broken(f"{where}: no gate has started\n{indented(printed(output))}")
            time.sleep(0.02)
        try:
            listens(ports, where, deadline, pids)
        except Broken as broken:
            raise Broken(f"{broken}\n{text}{indented(printed(output))}")
        try:
            listens(perhaps, where, time.monotonic() + PERHAPS_SECONDS)
        except Broken:
            pass  # A program may name a port that it connects to.

    def named_ports(self, text):
        """The page's ports in a text, but for those in a URL."""
        rest = re.sub(r"(?:--upstream|--store)[ =]\S+|\w+://\S+", "", text)
        return {port for port in re.findall(r"\b\d{4,5}\b", rest) if port in self.ports.values()}

    def ports_of_files(self, command):
        """The ports that the programs of a command name, where the command itself names none."""
        ports = set()
        for word in command.split():
            path = os.path.join(self.home, word)
            if os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    ports |= self.named_ports(file.read())
        return ports

    def end(self, keep):
        for process in (self.bash, *self.servers):
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
                # The group may outlive its leader: bash ends first.
                for _ in range(20):
                    process.poll()
                    try:
                        os.killpg(process.pid, 0)
                    except ProcessLookupError:
                        break
                    time.sleep(0.05)
        for one in self.held:
            one.close()
        if not keep:
            shutil.rmtree(self.box, ignore_errors=True)


def held_ports(count):
    """Sockets that hold a port each: the kernel gives it to no other process, and refuses connections to it.

    A server of the page can listen on it, as servers set SO_REUSEADDR and these sockets do not listen.
    """
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    return sockets


def listens(ports, who, deadline=None, pids=()):
    deadline = deadline or time.monotonic() + LISTEN_SECONDS
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                break
            except OSError:
                pass
            if not all(is_alive(pid) for pid in pids):
                raise Broken(f"{who}: the gate has ended")
            if time.monotonic() > deadline:
                raise Broken(f"{who}: no connection to port {port} after {LISTEN_SECONDS} s")
            time.sleep(0.05)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# What bash says when a background process was killed.
REAPED = re.compile(r"^\S+: line \d+: +\d+ (?:Killed|Terminated|Hangup|Interrupt).*\n", re.M)


def printed(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return REAPED.sub("", file.read())
    except FileNotFoundError:
        return ""


def normal(text, numbers_vary):
    lines = [line.rstrip() for line in text.split("\n")]
    if numbers_vary:
        lines = [re.sub(r"\d+(?:[.,]\d+)*", "0", re.sub(r" +", " ", line)) for line in lines]
    return "\n".join(lines).strip("\n") + "\n"


def expectation(text, numbers_vary, ports):
    """What the output has to match. A port is the page's, or, where a file of the repository names it, itself."""
    def literal(part):
        pieces = PORT.split(part)
        return "".join(f"(?:{piece}|{ports[piece]})" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))

    parts = []
    for line in normal(text, numbers_vary).split("\n")[:-1]:
        if line.strip() in ("...", "[...]"):
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append("[^\n]*".join(literal(part) for part in line.split("…")) + "\n")
    return re.compile("".join(parts))


def indented(text):
    return textwrap.indent(text if text.endswith("\n") else text + "\n", "    ")
