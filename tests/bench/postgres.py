"""PostgreSQL, and PgBouncer before it, started on free ports for one contestant and ended after it."""

import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import time

from processes import Failed, Server, free_port

# Near what Debian sets, but for the buffers: every commit is on the disk before it is acknowledged.
SETTINGS = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
max_connections = 400
shared_buffers = 256MB
fsync = on
synchronous_commit = on
"""

PGBOUNCER = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {directory}/users
pool_mode = transaction
max_client_conn = 400
log_connections = 0
log_disconnections = 0
"""


class Postgres:
    """A server with an empty database for the gate."""

    name = "postgres"
    keeps = True
    durable = True
    soaks = True
    settings = ""

    def __init__(self, directory):
        self.directory, self.port = directory / "postgres", free_port()
        self.directory.mkdir()
        self.user = as_other_than_root(self.directory)
        data = self.directory / "data"
        run([program("initdb"), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync",
             "--pgdata", data], **self.user)
        with open(data / "postgresql.conf", "a", encoding="utf-8") as settings:
            settings.write(SETTINGS.format(port=self.port))
        self.server = Server(
            "PostgreSQL", [program("postgres"), "-D", data], self.directory / "log", [self.port],
            stop_signal=signal.SIGINT, **self.user,
        )
        try:
            self._wait()
            self.sql("CREATE DATABASE oncegate", database="postgres")
        except BaseException:
            self.server.stop()
            raise
        self.servers = [self.server]
        self.url = self.url_of("oncegate")

    def _wait(self):
        """It listens before it lets anybody in."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.sql("SELECT 1", database="postgres")
            except Failed:
                if time.monotonic() > deadline or not self.server.alive():
                    raise
                time.sleep(0.05)

    def url_of(self, database):
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"

    def sql(self, text, database="oncegate"):
        """The first column of what a statement gives, as text, by lines."""
        command = [program("psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", self.url_of(database), "-c", text]
        return run(command).split()

    def prepare(self, binary, environment, database="oncegate"):
        """Lays out a database, which is empty."""
        run([binary, "migrate", "--store", self.url_of(database)], env=environment)

    def completed(self):
        """How many completed records it has."""
        return int(self.sql("SELECT count(*) FROM oncegate.record WHERE state = 1")[0])

    def size(self):
        """Bytes of the tables and indexes on disk; not the write-ahead log, which grows up to its limit first."""
        return int(self.sql("SELECT pg_database_size('oncegate')")[0])

    def stop(self):
        self.server.stop()


class PostgresPooled(Postgres):
    """The same through PgBouncer in transaction mode."""

    name = "postgres-pgbouncer"
    soaks = False

    def __init__(self, directory):
        super().__init__(directory)
        port = free_port()
        config = self.directory / "pgbouncer.ini"
        config.write_text(PGBOUNCER.format(server=self.port, port=port, directory=self.directory))
        (self.directory / "users").write_text('"postgres" ""\n')
        try:
            pooler = Server("PgBouncer", ["pgbouncer", config], self.directory / "pgbouncer.log", [port], **self.user)
        except BaseException:
            self.server.stop()
            raise
        self.servers = [self.server, pooler]
        self.url = f"postgres://postgres@127.0.0.1:{port}/oncegate"

    def stop(self):
        self.servers[1].stop()
        super().stop()


def as_other_than_root(directory):
    """Arguments of Popen that make the process another user's, to whom the directory is given: PostgreSQL and PgBouncer
    refuse to run as root."""
    if os.geteuid() != 0:
        return {}
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        user = pwd.getpwnam("nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": directory}


def program(name):
    """The path of one of PostgreSQL's programs, of the latest version there is."""
    versions = [path for path in pathlib.Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    for path in sorted(versions, key=lambda path: -int(path.parent.name)):
        if (path / name).exists():
            return path / name
    found = shutil.which(name)
    if not found:
        raise Failed(f"{name} is missing: install Debian's postgresql")
    return pathlib.Path(found)


def run(command, **more):
    """Runs a program to its end. What it prints."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, **more
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise Failed(f"{pathlib.Path(command[0]).name} ended with status {done.returncode}:\n{said}")
    return done.stdout
