"""What one tenant does to a gate that another one uses too, each as a process of its own, and the upstream behind both."""

import asyncio
import contextlib
import multiprocessing
import os
import pathlib
import resource
import signal

from processes import start

HOST = "bench.test"
SCRIPT = pathlib.Path(__file__).with_name("load.lua")
MIB = 1 << 20
# Of answers that are kept as a whole, the largest, and less than `max_response_body`.
LARGE = 15 * MIB
WAITERS, SLOW, BODIES, READERS, FAST_READERS, SPRAYERS = 10_000, 5_000, 16, 64, 6, 64


class Spray:
    """New keys, as fast as they are answered."""

    def __init__(self, path):
        self.path = path

    @contextlib.contextmanager
    def run(self, port, tag, seconds):
        command = ["wrk", "-t", 1, "-c", SPRAYERS, "-d", f"{seconds}s", "--timeout", "10s", "-s", SCRIPT,
                   f"http://127.0.0.1:{port}", "--", "unique", self.path, HOST, tag]
        with open(os.devnull, "w") as output:
            process = start(command, output)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


class Crowd:
    """Many connections of one address, which is not the other tenant's. Each runs `one` again and again."""

    def __init__(self, count, one):
        self.count, self.one = count, one

    @contextlib.contextmanager
    def run(self, port, tag, _seconds):
        process = multiprocessing.Process(target=self._main, args=(port, tag), daemon=True)
        process.start()
        try:
            yield
        finally:
            process.terminate()
            process.join()

    def _main(self, port, tag):
        become_child()
        asyncio.run(self._crowd(port, tag))

    async def _crowd(self, port, tag):
        opening = asyncio.Semaphore(100)

        async def again(number):
            turn = 0
            while True:
                writer = None
                try:
                    async with opening:
                        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
                    while True:
                        turn += 1
                        await self.one(reader, writer, tag, f"{number}-{turn}")
                except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    await asyncio.sleep(1)
                finally:
                    if writer:
                        writer.close()

        await asyncio.gather(*(again(number) for number in range(self.count)))


async def wait(reader, writer, tag, _turn):
    """One more request with the key of an attempt that takes very long. Who is refused comes again."""
    writer.write(head("/loud/delay/600000", f"{tag}-wait", 2) + b"{}")
    await skip_answer(reader)
    await asyncio.sleep(5)


async def slow_answer(reader, writer, tag, turn):
    """A request that takes long. Who is refused comes again."""
    writer.write(head("/loud/delay/30000", f"{tag}-slow-{turn}", 2) + b"{}")
    await skip_answer(reader)
    await asyncio.sleep(1)


async def large_body(reader, writer, tag, turn):
    """A request with the largest body there may be."""
    piece = b"x" * (MIB // 4)
    writer.write(head("/loud/fast", f"{tag}-body-{turn}", 16 * MIB))
    for _ in range(64):
        writer.write(piece)
        await writer.drain()
    await skip_answer(reader)


async def slow_reader(reader, writer, tag, turn):
    """A large answer that is read at 64 KiB a second."""
    writer.write(head("/loud/large", f"{tag}-large-{turn}", 2) + b"{}")
    while await reader.read(65536):
        await asyncio.sleep(1)
    raise ValueError("closed")


async def large_answer(reader, writer, tag, turn):
    """A large answer that is read as fast as it comes."""
    writer.write(head("/loud/large", f"{tag}-answer-{turn}", 2) + b"{}")
    await skip_answer(reader)


# By name: what the attacks are. All at once is made of those with `quota`, which is how an operator stops a spray.
ATTACKS = {
    "spray": [Spray("/loud/fast")],
    "spray-quota": [Spray("/loud/limited")],
    "waiters": [Crowd(WAITERS, wait)],
    "bodies": [Crowd(BODIES, large_body)],
    "slow-answers": [Crowd(SLOW, slow_answer)],
    "slow-readers": [Crowd(READERS, slow_reader)],
    "large-answers": [Crowd(FAST_READERS, large_answer)],
}
ATTACKS["all"] = [
    Spray("/loud/limited"), Crowd(4_000, wait), Crowd(BODIES, large_body), Crowd(SLOW, slow_answer),
    Crowd(READERS, slow_reader),
]


def head(path, key, length):
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        f"Authorization: Bearer loud\r\nIdempotency-Key: {key}\r\n\r\n"
    ).encode()


async def skip_answer(reader):
    text = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in text.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))


class Helper:
    """What nginx cannot do by itself: answers after a delay, and large ones. One for each tenant, so that one's work is not
    the other's."""

    def __init__(self):
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=self._main, args=(theirs,), daemon=True)
        self.process.start()
        self.port = ours.recv()

    def _main(self, pipe):
        become_child()
        asyncio.run(self._serve(pipe))

    async def _serve(self, pipe):
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    @staticmethod
    async def _answer(reader, writer):
        """/TENANT/delay/MILLISECONDS or /TENANT/large[/BYTES]"""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            text = await reader.readuntil(b"\r\n\r\n")
            _, _, kind, *number = text.split(b" ", 2)[1].decode().split("/")
            if kind == "delay":
                await asyncio.sleep(int(number[0]) / 1000)
            length = 2 if kind == "delay" else int(number[0]) if number else LARGE
            writer.write(
                b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n" % length
            )
            while length > 0:
                piece = min(length, 65536)
                writer.write(b"7" * piece)
                length -= piece
                await writer.drain()
        writer.close()

    def stop(self):
        self.process.terminate()
        self.process.join()


def become_child():
    """Ctrl-C is the parent's business, which ends its children by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    all_files()


def all_files():
    """As many open files as this user may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
