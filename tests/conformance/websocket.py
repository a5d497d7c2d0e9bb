"""WebSocket by a library of others (websockets) on both sides of the gate, in the clear and over TLS: what clients get of the
upstream alone they get through the gate."""

import asyncio
import contextlib
import hashlib
import itertools
import pathlib
import random
import ssl
import sys
import threading
from urllib.parse import parse_qs, urlsplit

import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import certificates  # noqa: E402
import gate  # noqa: E402

# How long anything is waited for, in seconds.
PATIENCE = 20

# A connection that has become a WebSocket is no silent one, however short the limits. A route protects what has a key.
SERVER = """
[limits]
idle_timeout = "1s"
body_timeout = "1s"
"""
ROUTES = """
[[routes]]
name = "keyed"
methods = ["GET"]
path = "/keyed"
"""
LARGE = random.Random(1).randbytes(5 << 20)
TEXT = "größer, 価格, 🧾"


class Upstream:
    """Says back what it is sent, or does what the path says. It runs in a thread of its own."""

    def __init__(self, context=None):
        self.handshakes = 0
        # How connections ended that bear a name.
        self.ended = {}
        listening = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.run(context, listening)), daemon=True).start()
        listening.wait()

    async def run(self, context, listening):
        async with serve(
            self.handle, "127.0.0.1", 0, ssl=context, max_size=None, ping_interval=None,
            process_request=self.refuse, select_subprotocol=lambda _, offered: "shop.v1" if "shop.v1" in offered else None,
        ) as server:
            self.port = server.sockets[0].getsockname()[1]
            listening.set()
            await server.serve_forever()

    def refuse(self, connection, request):
        self.handshakes += 1
        if request.path == "/refused":
            answer = connection.respond(403, "not for you\n")
            answer.headers["X-Reason"] = "a"
            answer.headers["X-Reason"] = "b"
            return answer
        return None

    async def handle(self, connection):
        url = urlsplit(connection.request.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        named = asked.pop("named", None)
        try:
            await getattr(self, url.path.strip("/"))(connection, **asked)
        except websockets.ConnectionClosed:
            pass
        if named:
            self.ended[named] = connection.close_code, connection.close_reason

    async def end_of(self, named):
        """How this connection ended, once it has; each is told once."""
        for _ in range(1000):
            if named in self.ended:
                return self.ended.pop(named)
            await asyncio.sleep(0.01)
        return "goes on"

    async def echo(self, connection):
        async for message in connection:
            await connection.send(message)

    async def fragments(self, connection):
        """Each fragment of each message as one of its own."""
        while True:
            await connection.send([part async for part in connection.recv_streaming()])

    async def pings(self, connection):
        await asyncio.wait_for(await connection.ping(b"of the upstream"), PATIENCE)
        await connection.send("answered")

    async def close(self, connection, code, reason=""):
        await connection.close(int(code), reason)

    async def vanish(self, connection):
        await connection.recv()
        connection.transport.abort()

    async def headers(self, connection):
        given = connection.request.headers
        ours = ("x-forwarded-", "via", "traceparent", "sec-websocket-key", "host", "connection")
        await connection.send(repr(sorted(
            (name.lower(), value) for name, value in given.raw_items() if not name.lower().startswith(ours)
        )))


async def got(connection):
    return await asyncio.wait_for(connection.recv(), PATIENCE)


async def ends(connection):
    """How the other side ends the connection."""
    try:
        await got(connection)
    except websockets.ConnectionClosed as closed:
        return connection.close_code, connection.close_reason, closed.rcvd is not None
    return "goes on"


def end_to_end(answer):
    """The headers of an answer to a handshake, without what belongs to this one, and to one connection."""
    own = ("sec-websocket-accept", "via", "date", "server", "connection")
    return sorted((name.lower(), value) for name, value in answer.headers.raw_items() if name.lower() not in own)


async def cases(base, context, upstream):
    """Every case by its name, and what came of it."""

    def opened(path, **said):
        said = {"max_size": None, "ping_interval": None, "open_timeout": PATIENCE, "proxy": None, **said}
        return connect(base + path, ssl=context, **said)

    async with opened("/echo", subprotocols=["shop.v1", "shop.v3"]) as connection:
        answer = connection.response
        yield "handshake", (answer.status_code, connection.subprotocol, end_to_end(answer))
    own = {"Authorization": "Bearer t", "X-Own": "1"}
    async with opened("/headers", additional_headers=own, origin="https://shop.example") as connection:
        yield "headers of the handshake", await got(connection)
    messages = [("text", TEXT), ("bytes", b"\0\xff"), ("nothing", b""), ("5 MiB", LARGE), ("5 M of text", "é" * (5 << 19))]
    for compression in ("deflate", None):
        async with opened("/echo", compression=compression) as connection:
            for name, message in messages:
                await connection.send(message)
                came = await got(connection)
                whole = came.encode() if isinstance(came, str) else came
                yield f"{name}, {compression}", (type(came), len(whole), hashlib.sha256(whole).digest(), came == message)
        async with opened("/fragments", compression=compression) as connection:
            sent = ["a", "", "bé", "c" * 70_000]
            await connection.send(sent)
            came = [part async for part in connection.recv_streaming()]
            # An empty fragment may be left out by either library.
            yield f"fragments, {compression}", list(filter(None, came)) == list(filter(None, sent))
    async with opened("/echo") as connection:
        pong = await connection.ping(b"of the client")
        yield "a ping of the client", await asyncio.wait_for(pong, PATIENCE) is not None
        await connection.send("behind it")
        yield "behind a ping", await got(connection)
    async with opened("/pings") as connection:
        yield "a ping of the upstream", await got(connection)
    for code, reason in ((1000, ""), (1001, "going"), (1011, "é" * 61), (3000, ""), (4999, "own")):
        async with opened(f"/close?code={code}" + (f"&reason={reason}" if reason.isascii() and reason else "")) as connection:
            yield f"the upstream closes with {code}", await ends(connection)
        async with opened(f"/echo?named={code}") as connection:
            await connection.close(code, reason)
        yield f"the client closes with {code}", await upstream.end_of(str(code))
    async with opened("/vanish") as connection:
        await connection.send("go")
        yield "the upstream vanishes", await ends(connection)
    connection = await opened("/echo?named=vanishes")
    connection.transport.abort()
    yield "the client vanishes", await upstream.end_of("vanishes")
    async with opened("/echo") as connection:
        await connection.send("before")
        before = await got(connection)
        await asyncio.sleep(1.5)
        await connection.send("after a silence")
        yield "a silence", (before, await got(connection))
    try:
        await opened("/refused")
    except websockets.InvalidStatus as refused:
        answer = refused.response
        yield "refused", (answer.status_code, end_to_end(answer), answer.body)
    yield "thirty at once", await at_once(opened)


async def at_once(opened):
    """Thirty connections, each of which gets its own answers while all are open."""
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(opened("/echo")) for _ in range(30)]
        for turn in range(10):
            for nth, connection in enumerate(connections):
                await connection.send(f"{nth} {turn}")
            if [await got(connection) for connection in connections] != [f"{nth} {turn}" for nth in range(30)]:
                return False
    return True


async def with_a_key(base, context, upstream):
    """No WebSocket where a route protects it and a key is there; it does not reach the upstream."""
    before = upstream.handshakes
    try:
        await connect(base + "/keyed", ssl=context, proxy=None, additional_headers={"Idempotency-Key": "k"})
    except websockets.InvalidStatus as refused:
        assert refused.response.status_code == 400 and b"bad-request" in refused.response.body, refused.response
    else:
        raise AssertionError("an upgrade with a key on a protected route")
    assert upstream.handshakes == before


async def main(work):
    directory = certificates.made(pathlib.Path(work) / "certificates")
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(directory / "server.pem", directory / "server.key")
    believes = ssl.create_default_context(cafile=directory / "ca.pem")
    plain, encrypted = Upstream(), Upstream(shown)
    upstreams = {
        "plain": (plain, f"ws://localhost:{plain.port}", f"http://127.0.0.1:{plain.port}"),
        "TLS": (encrypted, f"wss://localhost:{encrypted.port}",
                certificates.upstream(f"https://localhost:{encrypted.port}", directory)),
    }
    expected = {
        name: {case: came async for case, came in cases(base, believes if name == "TLS" else None, upstream)}
        for name, (upstream, base, _) in upstreams.items()
    }
    same = different = 0
    for client, (name, (upstream, _, configured)) in itertools.product(("plain", "TLS"), upstreams.items()):
        lines = (certificates.listener(directory) if client == "TLS" else "") + SERVER
        with gate.started(work, f"websocket-{client}-{name}", configured, lines, ROUTES) as between:
            scheme, context = ("wss", believes) if client == "TLS" else ("ws", None)
            base = f"{scheme}://localhost:{between.port}"
            async for case, came in cases(base, context, upstream):
                is_same = came == expected[name][case]
                same, different = same + is_same, different + (not is_same)
                if not is_same:
                    print(f"{client} to {name}: {case}: DIFFERS\n  {expected[name][case]}\n  {came}"[:2000])
            await with_a_key(base, context, upstream)
    print(f"tests/conformance/run: WebSocket by websockets {websockets.__version__}: {same} cases are the same through the "
          f"gate, {different} differ (plain and TLS on both sides)")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
