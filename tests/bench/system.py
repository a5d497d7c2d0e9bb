"""What the machine is, and what it needs before anything can be measured."""

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import time

from processes import Failed

# What is installed where the program is missing. Their services are not started.
PACKAGES = {
    "nginx": "nginx-light", "haproxy": "haproxy", "wrk": "wrk", "pgbench": "postgresql", "pgbouncer": "pgbouncer",
    "redis-server": "redis-server", "h2load": "nghttp2-client", "node": "nodejs", "npm": "npm", "openssl": "openssl",
    "patroni": "patroni", "etcd": "etcd-server",
}

INSTALL = """
set -e
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\\nexit 101\\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "$@"
"""


def install_missing(programs):
    """Installs what is missing from Debian's packages."""
    # A user's path may lack what services run from.
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    os.environ["PATH"] += "".join(f":{path}" for path in pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
    packages = [PACKAGES[program] for program in programs if not shutil.which(program)]
    if not packages:
        return
    if not shutil.which("apt-get"):
        raise Failed(f"missing, and no apt-get here to install it: {' '.join(packages)}")
    root = [] if os.geteuid() == 0 else ["sudo"]
    print(f"installing {' '.join(packages)}", flush=True)
    done = subprocess.run([*root, "sh", "-c", INSTALL, "install", *packages], stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"could not install {' '.join(packages)}")


def build(root, target):
    """The program that is shipped, which is made first."""
    print("building the binary that is shipped", flush=True)
    done = subprocess.run(["cargo", "build", "--profile", "ship", "--locked"], cwd=root, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed("the build failed")
    return target / "ship" / "oncegate"


def interrupted(number, _frame):
    """Ends the program where a signal comes, by way of what stops the servers."""
    raise SystemExit(128 + number)


def syncs_per_second(directory, seconds=0.7):
    """How often this disk makes 4 KiB durable in a second: pwrite and fdatasync, again and again, over a file that
    has its blocks already."""
    path = pathlib.Path(directory) / "sync"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, bytes(1 << 20), 0)
        os.fsync(file)
        block, count, start = b"x" * 4096, 0, time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            os.pwrite(file, block, count % 256 * 4096)
            os.fdatasync(file)
            count += 1
        return count / elapsed
    finally:
        os.close(file)
        path.unlink()


def file_system(directory):
    """The type of the file system that a directory is on."""
    return output_of(["findmnt", "-n", "-o", "FSTYPE", "-T", directory])


def describe(root, store_directory, binaries, built):
    """What the figures depend on, as pairs of name and value."""
    found = {
        "cores": f"{os.cpu_count()} ({processor()})",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "nginx": output_of(["nginx", "-v"]).rpartition("/")[2],
        "HAProxy": output_of(["haproxy", "-v"]).split()[2],
        "wrk": output_of(["wrk", "-v"], statuses=(0, 1)).split()[1].removeprefix("debian/"),
    }
    for label, binary in binaries.items():
        version = output_of([binary, "--version"]).removeprefix("oncegate ")
        # The commit is that of a build made here; another's is not known, but its bytes are.
        source = f"commit {commit(root)}" if built else f"SHA-256 {digest(binary)}"
        found[label] = f"{version} ({source})"
    found["store's file system"] = file_system(store_directory)
    return found


def commit(root):
    hash_ = output_of(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
    changed = output_of(["git", "-C", root, "status", "--porcelain", "--", "src", "Cargo.toml", "Cargo.lock"])
    return hash_ + (", with changes" if changed else "")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def output_of(command, statuses=(0,)):
    """What a command prints, its first line; "unknown" where it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30
        )
    except OSError:
        return "unknown"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode not in statuses:
        return "unknown"
    return lines[0] if lines else ""
