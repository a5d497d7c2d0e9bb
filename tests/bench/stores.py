"""The stores that oncegate can be measured on. A new one is a class and a line in STORES.

A store is made with a directory of its own. It has the `url` for the configuration once it is made (one that needs a
server starts it then, and can keep its files in the directory) and is laid out by `prepare` before its gate starts. It
has more `settings` for the configuration, it says whether it is `durable`, which is what the chart shows, whether it `keeps` records when its gate ends, whether it `soaks` unless it is asked to, which `servers`
work for it, and how many records it has `completed`, if anybody but the gate can see that. It is stopped after its
gate."""

from postgres import Postgres, PostgresPooled
from redis import PostgresCached, Redis


class Sqlite:
    """One file, on the disk that the bench works on."""

    name = "sqlite"
    keeps = True
    durable = True
    soaks = True
    servers = ()
    settings = ""

    def __init__(self, directory):
        self.path = directory / "oncegate.db"
        self.url = f"sqlite:{self.path}"

    def prepare(self, binary, environment):
        """The gate lays out the file itself."""

    def completed(self):
        return None

    def size(self):
        """Bytes on disk."""
        files = self.path.parent.glob(self.path.name + "*")
        return sum(file.stat().st_size for file in files if not file.name.endswith((".lock", ".reserve")))

    def stop(self):
        """The directory is removed as a whole."""


class Memory:
    """The process's own memory: nothing is kept."""

    name = "memory"
    keeps = False
    durable = False
    soaks = True
    servers = ()
    settings = ""
    url = "memory:"

    def __init__(self, directory):
        pass

    def prepare(self, binary, environment):
        """There is nothing to lay out."""

    def completed(self):
        return None

    def size(self):
        return 0

    def stop(self):
        """It ends with its process."""


STORES = {store.name: store for store in (Sqlite, Memory, Postgres, PostgresPooled, PostgresCached, Redis)}
