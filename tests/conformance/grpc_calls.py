"""Calls by gRPC's own library, of all four kinds, to an upstream that is gRPC's own too, in the clear and over TLS on both
sides of the gate: what they get of the upstream alone they get through the gate, and a call with a key runs once."""

import itertools
import os
import pathlib
import sys
import threading
import time

# The library tells of each process that is started beside it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Processes that are started beside it have no use for the library.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # noqa: E402

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import certificates  # noqa: E402
import gate  # noqa: E402
import grpc_service  # noqa: E402

KEY = "idempotency-key"
SAID = (
    ("x-text", "text, with a comma"), ("x-twice", "1"), ("x-twice", "2"), ("x-empty", ""),
    ("x-in-bin", bytes(range(256))), ("x-in-bin", b""), ("x-in-bin", b"\0"),
)
ROUTES = """
[[routes]]
name = "calls"
methods = ["POST"]
path = "/{*rest}"
outcomes = { "grpc:UNAVAILABLE" = "release" }
"""
# Retries by the library itself, as services ask for them.
RETRYING = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s",
"maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


def foreign(lines):
    """Metadata without what belongs to the gate and to HTTP."""
    ours = ("idempotency-", "idempotent-", "via", "date", "x-forwarded-", "traceparent")
    return sorted((key, value) for key, value in lines or () if not key.startswith(ours))


def ended(call):
    return (call.code(), call.details(), foreign(call.initial_metadata()), foreign(call.trailing_metadata()))


def call(channel, kind, requests, timeout=10, **said):
    """(messages, the call) of any kind, once it has ended."""
    method = f"/test.Service/{kind}"
    streams = {
        "Unary": channel.unary_unary, "Server": channel.unary_stream,
        "Client": channel.stream_unary, "Bidi": channel.stream_stream,
    }[kind](method)
    request = iter(requests) if kind in ("Client", "Bidi") else requests[0]
    messages = []
    try:
        if kind in ("Unary", "Client"):
            answer, made = streams.with_call(request, timeout=timeout, **said)
            messages.append(answer)
        else:
            made = streams(request, timeout=timeout, **said)
            messages.extend(made)
    except grpc.RpcError as error:
        made = error
    return messages, made


def outcome(service, channel, kind, requests, **said):
    """All that both sides saw of a call."""
    messages, made = call(channel, kind, requests, **said)
    return messages, ended(made), foreign(service.metadata)


def talk(channel):
    """Each message waits for the answer to the one before."""
    answered = threading.Semaphore(1)

    def messages():
        for nth in range(50):
            assert answered.acquire(timeout=10), "an answer was held back"
            yield str(nth).encode()

    answers = []
    made = channel.stream_stream("/test.Service/Bidi")(messages(), timeout=30)
    for answer in made:
        answers.append(answer)
        answered.release()
    return answers, ended(made)


def left(service, channel, kind, **said):
    """How a call ends that its client gives up while it runs, and whether the service sees that."""
    service.left.clear()
    service.running.clear()
    over = threading.Event()

    def requests():
        yield b"stay"
        over.wait(20)

    if kind == "Unary":
        made = channel.unary_unary("/test.Service/Unary").future(b"stay", timeout=20)
    elif kind == "Client":
        made = channel.stream_unary("/test.Service/Client").future(requests(), timeout=20)
    elif kind == "Server":
        made = channel.unary_stream("/test.Service/Server")(b"stay", timeout=20)
    else:
        made = channel.stream_stream("/test.Service/Bidi")(requests(), timeout=20)
    assert service.running.wait(10), "the call does not run"
    made.cancel()
    seen = service.left.wait(5)
    over.set()
    return made.code(), seen


def past(service, channel, kind):
    """How a call ends whose deadline passes while it runs, and whether the service sees that."""
    # On a busy machine it may pass before the call runs.
    for seconds in (0.3, 1, 3):
        service.left.clear()
        service.running.clear()
        _, made = call(channel, kind, [b"stay"], timeout=seconds)
        seen = service.left.wait(5)
        if service.running.is_set():
            break
    return made.code(), seen


def deadline(service, channel, given):
    """Whether the service has as much time as the client gave it, but for a fifth of a second on the way; the library may round
    it up by a hundredth."""
    # A machine that stands still for a moment takes something of it, and never of all.
    for _ in range(5):
        service.remaining = 0
        call(channel, "Unary", [b"x"], timeout=given)
        if given is None:
            return service.remaining is None or service.remaining > 1e6
        if given - 0.2 <= service.remaining <= given * 1.01:
            return True
    return service.remaining


def cases(service, channel):
    """Every case by its name, and what came of it."""
    three = [b"a", b"", b"c" * 100_000]
    for kind in ("Unary", "Server", "Client", "Bidi"):
        def got(*requests, kind=kind, **said):
            return outcome(service, channel, kind, requests, **said)

        yield f"{kind}: metadata, text and bytes", got(*three, metadata=SAID)
        yield f"{kind}: compressed", got(b"z" * 10_000, b"y" * 10_000, compression=grpc.Compression.Gzip)
        yield f"{kind}: 2 MB", got(b"l" * 2_000_000, b"m")
        yield f"{kind}: a status with details", got(b"fail")
        yield f"{kind}: UNAVAILABLE", got(b"away")
        yield f"{kind}: a service that fails", got(b"raise")
        yield f"{kind}: a client that leaves", left(service, channel, kind)
        yield f"{kind}: a deadline that passes", past(service, channel, kind)
    yield "Unary: empty", outcome(service, channel, "Unary", [b""])
    yield "Client: 1,000 messages", outcome(service, channel, "Client", [b"m"] * 1000)
    yield "Bidi: 1,000 messages", outcome(service, channel, "Bidi", [b"m"] * 1000)
    yield "Bidi: in turns", talk(channel)
    messages, made = call(channel, "Unary", [b"x"], wait_for_ready=True)
    yield "Unary: waiting until it can", (messages, ended(made))
    _, made = call_unknown(channel)
    yield "a method that is not there", ended(made)
    for given in (0.9, 7, 3600, None):
        yield f"a deadline of {given} s", deadline(service, channel, given)


def call_unknown(channel):
    try:
        return channel.unary_unary("/test.Service/Missing").with_call(b"", timeout=10)
    except grpc.RpcError as error:
        return None, error


def keyed(service, channel, retrying):
    """Calls with a key, and their retries; gives the name of each case that holds."""
    nth = itertools.count()

    def again(kind, requests, codes, runs, is_kept=True):
        key = f"k-{next(nth)}"
        got = [call(channel, kind, requests, metadata=((KEY, key), *SAID)) for _ in codes]
        assert [made.code().name for _, made in got] == codes, (key, [made for _, made in got])
        assert service.runs[key] == runs, (key, service.runs[key])
        if is_kept:
            assert len({repr((messages, ended(made))) for messages, made in got}) == 1, (key, got)
            marks = [dict(made.initial_metadata()).get("idempotent-replayed") or
                     dict(made.trailing_metadata()).get("idempotent-replayed") for _, made in got]
            assert marks == [None, "true", "true"], (key, marks)
        return key

    stored = again("Unary", [b"x"], ["OK"] * 3, 1)
    yield "a key: runs once"
    again("Unary", [b"l" * 2_000_000], ["OK"] * 3, 1)
    yield "a key: 2 MB, runs once"
    again("Unary", [b"fail"], ["FAILED_PRECONDITION"] * 3, 1)
    yield "a key: a status with details, runs once"
    again("Unary", [b"away"], ["UNAVAILABLE"] * 2, 2, is_kept=False)
    yield "a key: UNAVAILABLE, released"
    again("Unary", [b"raise"], ["UNKNOWN"] * 2, 1, is_kept=False)
    yield "a key: UNKNOWN, held"
    for kind in ("Server", "Client"):
        again(kind, [b"s", b"t"][: 1 if kind == "Server" else 2], ["OK"] * 3, 1)
        yield f"a key: {kind}, runs once"
    _, made = call(channel, "Unary", [b"other"], metadata=((KEY, stored),))
    assert made.code() is grpc.StatusCode.FAILED_PRECONDITION and made.details().startswith("key-reused: "), made
    yield "a key: reused"
    yield from left_with_a_key(service, channel)
    if retrying:
        yield from two_clients(service, channel, retrying)


def begun(service, channel, key):
    """A call with this key that runs until it may go on."""
    service.running.clear()
    service.go.clear()
    held = {"metadata": ((KEY, key),), "timeout": 20}
    first = channel.unary_unary("/test.Service/Unary").future(b"held", **held)
    assert service.running.wait(10), "the call does not run"
    return held, first


def left_with_a_key(service, channel):
    """A client that leaves changes nothing: the call goes on, and its answer waits for the retry."""
    service.left.clear()
    held, first = begun(service, channel, "k-left")
    first.cancel()
    assert first.code() is grpc.StatusCode.CANCELLED
    _, made = call(channel, "Unary", [b"held"], **held)
    assert made.code() is grpc.StatusCode.UNAVAILABLE and made.details().startswith("in-flight: "), made
    yield "a key: in flight though its client left"
    service.go.set()
    for _ in range(200):
        messages, made = call(channel, "Unary", [b"held"], **held)
        if made.code() is not grpc.StatusCode.UNAVAILABLE:
            break
        time.sleep(0.05)
    assert (messages, made.code(), service.runs["k-left"]) == ([b"re:held"], grpc.StatusCode.OK, 1), made
    assert not service.left.is_set(), "the service was told that the client left"
    yield "a key: completed after its client left, and replayed"


def two_clients(service, channel, retrying):
    """Two clients with one key at once: the library tries the second again by itself, when the gate says."""
    held, first = begun(service, channel, "k-two")
    second = retrying.unary_unary("/test.Service/Unary").future(b"held", **held)
    _, made = call(channel, "Unary", [b"held"], **held)
    assert made.details().startswith("in-flight: "), made
    service.go.set()
    assert first.result() == second.result() == b"re:held" and service.runs["k-two"] == 1
    yield "a key: two clients at once, one run"


def channels(port, directory, encrypted, options):
    if not encrypted:
        return grpc.insecure_channel(f"127.0.0.1:{port}", options)
    authority = grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes())
    return grpc.secure_channel(f"localhost:{port}", authority, options)


def main(work):
    directory = certificates.made(pathlib.Path(work) / "certificates")
    service, server, plain, encrypted = grpc_service.serving(directory)
    print(f"gRPC {grpc.__version__}, {gate.version(work)}")
    large = ("grpc.max_receive_message_length", 8 << 20)
    quiet, retrying = [("grpc.enable_retries", 0), large], [("grpc.service_config", RETRYING), large]
    upstreams = {
        "h2c": (plain, f'{{ url = "http://127.0.0.1:{plain}", protocol = "h2" }}'),
        "TLS": (encrypted, certificates.upstream(f"https://localhost:{encrypted}", directory)),
    }
    expected = {}
    for name, (port, _) in upstreams.items():
        with channels(port, directory, name == "TLS", quiet) as alone:
            expected[name] = dict(cases(service, alone))
    same = different = holding = 0
    for client, (name, (_, upstream)) in itertools.product(("h2c", "TLS"), upstreams.items()):
        server_lines = certificates.listener(directory) if client == "TLS" else ""
        service.runs.clear()
        with gate.started(work, f"grpc-{client}-{name}", upstream, server_lines, ROUTES) as between, \
                channels(between.port, directory, client == "TLS", quiet) as channel, \
                channels(between.port, directory, client == "TLS", retrying) as patient:
            for case, got in cases(service, channel):
                is_same = got == expected[name][case]
                same, different = same + is_same, different + (not is_same)
                if not is_same:
                    shown = "".join(f"\n  {str(one)[:600]}" for one in (expected[name][case], got))
                    print(f"{client} to {name}: {case}: differs{shown}")
            # It waits for as long as the gate says, which is some seconds: once is enough.
            by_itself = patient if client == name == "TLS" else None
            holding += sum(1 for _ in keyed(service, channel, by_itself))
    server.stop(None)
    print(f"tests/conformance/run: gRPC: {same} calls of all kinds are the same through the gate, {different} differ, "
          f"{holding} cases with a key hold (h2c and TLS on both sides)")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
