"""Processes that are started, watched and ended by their ids."""

import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import time

TICKS = os.sysconf("SC_CLK_TCK")
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """The bench cannot go on, and why."""


def free_port():
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command, output, **more):
    """Starts a process with this output. Ctrl-C reaches this program only, which then ends what it started in order;
    and should this program be killed, what it started goes with it."""
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        **more,
    )


class Server:
    """A process that listens; itself and its children are measured together."""

    def __init__(self, name, command, log, ports, environment=None, stop_signal=signal.SIGTERM, **more):
        self.name, self.log, self.stop_signal = name, pathlib.Path(log), stop_signal
        with open(self.log, "ab") as output:
            self.process = start(command, output, env=environment, **more)
        try:
            for port in ports:
                self._wait_for(port)
        except BaseException:
            self.stop()
            raise

    def _wait_for(self, port):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with status {self.process.returncode}:\n{self.tail()}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.01)
        raise Failed(f"{self.name} does not listen on port {port} after 20 s:\n{self.tail()}")

    def tail(self):
        """The end of what the process wrote."""
        return self.log.read_text(errors="replace")[-2000:]

    def alive(self):
        return self.process.poll() is None

    def stop(self, patience=10):
        """Ends the process: by SIGTERM or what else it was made with, and where that takes too long, by SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                return False
        return True

    def pids(self):
        """The process and its children."""
        pid = self.process.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def cpu_seconds(self):
        """User and system time of all its threads and children so far, of those too that have ended."""
        first, *children = self.pids()
        ticks = sum(times(first)) + sum(sum(times(child)[:2]) for child in children)
        return ticks / TICKS

    def memory(self):
        """(resident now, most that was resident since `forget_peak`), in bytes."""
        resident = peak = 0
        for pid in self.pids():
            for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    resident += int(line.split()[1]) * 1024
                elif line.startswith("VmHWM:"):
                    peak += int(line.split()[1]) * 1024
        return resident, peak

    def forget_peak(self):
        """Lets the peak of resident memory count from now."""
        for pid in self.pids():
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def times(pid):
    """Ticks of a process: user, system, and the same of its children that have ended; none where it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [0] * 4
    return [int(field) for field in fields[11:15]]
