"""A receiver of OTLP over HTTP on the loopback, which keeps what it is sent as files. Knows no test."""

import contextlib
import gzip
import http.server
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Traces:
    """A running receiver: where it is, and the folder with a file for each request."""

    url: str
    folder: Path

    def spans(self) -> list[tuple[str, Span]]:
        """Everything received so far, each span with the name of the service that sent it."""
        found = []
        for path in sorted(self.folder.glob("*.pb")):
            for sent in ExportTraceServiceRequest.FromString(path.read_bytes()).resource_spans:
                service = next(a.value.string_value for a in sent.resource.attributes if a.key == "service.name")
                found += [(service, span) for scope in sent.scope_spans for span in scope.spans]
        return found


@contextlib.contextmanager
def running_receiver(folder: Path) -> Iterator[Traces]:
    """One that accepts whatever comes, until the block ends."""
    folder.mkdir()
    numbers = itertools.count()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            draft = folder / f"{next(numbers):06}.new"
            draft.write_bytes(body)
            draft.rename(draft.with_suffix(".pb"))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Traces(f"http://127.0.0.1:{server.server_address[1]}", folder)
        finally:
            server.shutdown()
            thread.join()
