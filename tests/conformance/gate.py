"""The gate as a process, before an upstream of somebody else's."""

import contextlib
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))

from processes import Server, free_port  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONF = """
[server]
listen = "127.0.0.1:{port}"
{server}
[admin]
listen = "127.0.0.1:{admin}"
[store]
url = "sqlite:{work}/gate.db"
[upstreams]
app = {upstream}
{routes}
"""

ALL = """
[[routes]]
name = "all"
methods = ["POST", "PATCH"]
path = "/{*rest}"
"""


def binary(work):
    """The release build where there is one that is newer than the other, else the other."""
    target = pathlib.Path(work).parent
    builds = [path for path in (target / "release" / "oncegate", target / "debug" / "oncegate") if path.exists()]
    return max(builds, key=lambda path: path.stat().st_mtime)


@contextlib.contextmanager
def started(work, name, upstream, server="", routes=ALL):
    """Starts the gate on a store of its own; `upstream` is a URL or a table, `server` is lines for `[server]`, `routes`
    are tables."""
    directory = pathlib.Path(work) / f"gate-{name}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    port = admin = free_port()
    while admin == port:
        admin = free_port()
    conf = directory / "oncegate.toml"
    upstream = upstream if upstream.startswith("{") else f'"{upstream}"'
    words = {"upstream": upstream, "server": server, "routes": routes}
    conf.write_text(CONF.format(port=port, admin=admin, work=directory, **words))
    command = [binary(work), "serve", "--config", conf]
    gate = Server("the gate", command, directory / "log", [port, admin])
    gate.port, gate.admin = port, admin
    try:
        yield gate
    finally:
        gate.stop()


def version(work):
    return said_by(binary(work), "--version")


def said_by(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
