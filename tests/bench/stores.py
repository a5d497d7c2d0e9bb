"""The stores that oncegate can be measured on. A new one is a class and a line in STORES."""


class Sqlite:
    """One file, on the disk that the bench works on."""

    name = "sqlite"

    def __init__(self, directory):
        self.path = directory / "oncegate.db"
        self.url = f"sqlite:{self.path}"

    def size(self):
        """Bytes on disk."""
        files = self.path.parent.glob(self.path.name + "*")
        return sum(file.stat().st_size for file in files if not file.name.endswith((".lock", ".reserve")))

    def stop(self):
        """The directory is removed as a whole."""


class Memory:
    """The process's own memory: nothing is kept."""

    name = "memory"
    url = "memory:"

    def __init__(self, directory):
        pass

    def size(self):
        return 0

    def stop(self):
        """It ends with its process."""


# A store gets a directory of its own that does not exist yet as `directory`'s content is made later; it has a `url`
# for the configuration once it is made, and is stopped after its gate.
STORES = {"sqlite": Sqlite, "memory": Memory}
