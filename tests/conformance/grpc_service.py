"""A service by gRPC's own library that says what it was asked and by whom, and sees when its clients leave."""

import collections
import threading
from concurrent import futures

import grpc

DETAILS = (("grpc-status-details-bin", b"\x08\x09"),)
# How long the service waits for a client to leave, or to be let go.
PATIENCE = 10


class Failure(grpc.Status):
    """A status with details of its own."""

    code, details = grpc.StatusCode.FAILED_PRECONDITION, "no funds: 50 %, é\n"
    trailing_metadata = (*DETAILS, ("x-of-the-failure", "1"))


class Service(grpc.GenericRpcHandler):
    """Messages are bytes; the first one says what is to happen."""

    def __init__(self):
        self.runs = collections.Counter()
        # What it got with the last call.
        self.metadata, self.remaining = [], None
        # A client left, or its deadline passed, while its call ran.
        self.left = threading.Event()
        # The call `held` runs, and may go on.
        self.running, self.go = threading.Event(), threading.Event()

    def service(self, details):
        kind, call = {
            "Unary": (grpc.unary_unary_rpc_method_handler, self.unary),
            "Server": (grpc.unary_stream_rpc_method_handler, self.server),
            "Client": (grpc.stream_unary_rpc_method_handler, self.client),
            "Bidi": (grpc.stream_stream_rpc_method_handler, self.bidi),
        }.get(details.method.rsplit("/", 1)[1], (None, None))
        return kind and kind(call)

    def begin(self, context):
        """What stands before every call, and behind it: metadata, text and bytes, each name twice."""
        self.metadata, self.remaining = list(context.invocation_metadata()), context.time_remaining()
        given = collections.defaultdict(list)
        for name, value in self.metadata:
            given[name].append(value)
        self.runs[given["idempotency-key"][0] if "idempotency-key" in given else None] += 1
        echoed = [("x-initial-bin", value) for value in given["x-in-bin"]]
        context.send_initial_metadata((("x-initial", "a, b"), ("x-initial", "c"), *echoed))
        context.set_trailing_metadata((("x-trail", "1"), ("x-trail", "2"), ("x-trail-bin", bytes(range(256)))))

    def wait_for_the_client_to_leave(self, context):
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(PATIENCE)
        if not context.is_active():
            self.left.set()

    def act(self, request, context):
        """What the first message asks for."""
        if request == b"fail":
            context.abort_with_status(Failure())
        if request == b"away":
            context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        if request == b"stay":
            self.running.set()
            self.wait_for_the_client_to_leave(context)
        if request == b"held":
            self.running.set()
            assert self.go.wait(PATIENCE)
            if not context.is_active():
                self.left.set()
        if request == b"raise":
            raise ValueError("not handled")

    def unary(self, request, context):
        self.begin(context)
        self.act(request, context)
        return b"re:" + request

    def server(self, request, context):
        self.begin(context)
        for nth in range(3):
            yield request + str(nth).encode()
        self.act(request, context)

    def client(self, requests, context):
        self.begin(context)
        came = [next(requests)]
        self.act(came[0], context)
        came.extend(requests)
        return b",".join(came) if len(came) < 100 else str(len(came)).encode()

    def bidi(self, requests, context):
        self.begin(context)
        for request in requests:
            yield b"re:" + request
            self.act(request, context)


def serving(directory):
    """(service, server, port of h2c, port of TLS); the certificates are those of the directory."""
    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", 8 << 20)])
    service = Service()
    server.add_generic_rpc_handlers((service,))
    pair = (directory / "server.key").read_bytes(), (directory / "server.pem").read_bytes()
    plain = server.add_insecure_port("127.0.0.1:0")
    encrypted = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    return service, server, plain, encrypted
