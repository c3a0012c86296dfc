"""An HTTP/1.1 client that costs little: kept connections, JSON answers, event streams. For the load generator alone.

It shares two cores with the server that it measures, and a general client takes as much of them as the server does.
Reads what our own API sends, and fails on anything else.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One kept connection: a request at a time."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"

    async def __aenter__(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Raises ConnectionError and asyncio.IncompleteReadError when the server hangs up."""
        self._send(method, path, b"" if body is None else json.dumps(body).encode(), "application/json")
        status, headers = await self._read_head()
        return Answer(status, await self._reader.readexactly(int(headers["content-length"])))

    async def events(self, path: str) -> AsyncIterator[dict[str, str]]:
        """The fields of each event until the server ends the stream; comments are passed over. Takes the connection."""
        self._send("GET", path, b"", "text/event-stream")
        status, headers = await self._read_head()
        if status != 200 or headers.get("transfer-encoding") != "chunked":
            raise ConnectionError(f"no event stream: status {status}")
        text = ""
        while size := int(await self._reader.readline(), 16):
            text += (await self._reader.readexactly(size + 2))[:-2].decode().replace("\r\n", "\n")
            *blocks, text = text.split("\n\n")
            for block in blocks:
                fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
                if fields:
                    yield fields

    def _send(self, method: str, path: str, body: bytes, accept: str) -> None:
        head = f"{method} {path} HTTP/1.1\r\n{self._head}Accept: {accept}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split(" ")[1]), headers
