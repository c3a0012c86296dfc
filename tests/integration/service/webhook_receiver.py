"""A real HTTP server on the loopback that receives webhooks and misbehaves by path. Knows no test."""

import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Receiver:
    """What arrived, in order: path, headers (lower case), body.

    fail_first  how many messages to /flaky are answered with 500 before 200
    """

    url: str
    port: int
    fail_first: int = 1
    messages: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def at(self, path: str) -> list[tuple[dict[str, str], bytes]]:
        return [(headers, body) for seen, headers, body in self.messages if seen == path]


@contextmanager
def running_receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    over = threading.Event()
    receiver = Receiver("", 0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            receiver.messages.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            with contextlib.suppress(OSError):
                self._answer()

        def _answer(self) -> None:
            if self.path == "/hang":
                over.wait(20)
            elif self.path == "/drip":  # headers without an end, a byte at a time
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not over.wait(0.1):
                    self.wfile.write(b"x")
            elif self.path == "/garbage":
                self.wfile.write(b"\0\xffnot http\r\n\r\n")
                self.close_connection = True
            elif self.path == "/endless":
                self._head(200, length=2**40)
                while not over.is_set():
                    self.wfile.write(b"x" * 65536)
            elif self.path == "/redirect":
                self._head(307, Location=f"{receiver.url}/ok")
            elif self.path == "/flaky":
                self._head(500 if len(receiver.at("/flaky")) <= receiver.fail_first else 200)
            else:
                self._head({"/gone": 410, "/broken": 500}.get(self.path, 204))

        def _head(self, status: int, length: int = 0, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Into nowhere."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Of clients that go away, as they should."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    receiver.port = server.server_port
    receiver.url = f"http://127.0.0.1:{receiver.port}"
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
