"""Redis, as the store itself or as the cache in front of PostgreSQL, started on a free port for one contestant."""

import contextlib
import os
import shutil
import signal
import socket

from postgres import Postgres, as_other_than_root
from processes import Failed, Server, free_port


class RedisServer:
    """A server; what it is asked to write down is in its settings."""

    def __init__(self, directory, *settings):
        self.directory, self.port = directory / "redis", free_port()
        self.directory.mkdir()
        user = as_other_than_root(self.directory)
        binary = shutil.which("redis-server")
        if not binary:
            raise Failed("redis-server is missing: install Debian's redis-server")
        self.server = Server(
            "Redis",
            [binary, "--bind", "127.0.0.1", "--port", self.port, "--dir", self.directory, "--save", "", *settings],
            directory / "redis.log", [self.port], **user,
        )
        self.url = f"redis://127.0.0.1:{self.port}"

    def ask(self, *words):
        """What it says to a command whose answer is a number or a line."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.makefile("rb").readline().decode().strip().lstrip(":+")


class Redis:
    """A Redis that syncs what it appends once a second, which is its own default where it appends at all."""

    name = "redis"
    keeps = True
    durable = False
    soaks = True
    settings = ""

    def __init__(self, directory):
        self.redis = RedisServer(directory, "--appendonly", "yes", "--appendfsync", "everysec")
        self.servers, self.url = [self.redis.server], self.redis.url

    def prepare(self, binary, environment):
        """There is nothing to lay out."""

    def completed(self):
        # What stands from 0 to below 2^51 is completed: see the prelude of the scripts.
        return sum(int(self.redis.ask("ZCOUNT", f"oncegate{{{part:02}}}:t", "0", f"({1 << 51}")) for part in range(64))

    def size(self):
        """Bytes of what is appended."""
        files = (self.redis.directory / "appendonlydir").glob("*")
        return sum(file.stat().st_size for file in files)

    def stop(self):
        self.redis.server.stop()


class PostgresCached(Postgres):
    """PostgreSQL with a Redis in front that writes nothing down."""

    name = "postgres-redis"
    soaks = False

    def __init__(self, directory):
        super().__init__(directory)
        try:
            self.redis = RedisServer(directory, "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
        except BaseException:
            self.server.stop()
            raise
        self.servers = [self.server, self.redis.server]
        self.settings = f'cache = "{self.redis.url}"'

    @contextlib.contextmanager
    def hung(self):
        """Meanwhile the cache takes connections and says nothing."""
        os.kill(self.redis.server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.redis.server.process.pid, signal.SIGCONT)

    def stop(self):
        self.redis.server.stop()
        super().stop()
