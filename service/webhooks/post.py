"""Sends one signed message to one endpoint: no redirects, no proxy, no second look at the name, little time.

The connection goes to the address that was checked; TLS is verified against the host's name all the same. Of the answer
only the status is read. Must not know jobs or SQL.
"""

import ssl
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import httpcore
from standardwebhooks.webhooks import Webhook as Signer

from service.webhooks.address import Endpoint
from worker.outbox import Outcome

CONNECT_S = 5.0
WHOLE_S = 15.0
USER_AGENT = "kvalign-webhooks/1"

_GONE = 410


class Poster:
    """Posts messages; safe to share between threads.

    whole_s  how long one may take from connecting to the answer's status, whatever the receiver does
    """

    def __init__(self, tls: ssl.SSLContext | None = None, *, whole_s: float = WHOLE_S) -> None:
        self._tls = tls or ssl.create_default_context()
        self._whole_s = whole_s

    def post(self, endpoint: Endpoint, secret: str, message_id: str, at: datetime, payload: str) -> Outcome:
        """What the receiver said, or why it said nothing; raises nothing that a receiver could cause."""
        backend = _Pinned(endpoint.addresses, time.monotonic() + self._whole_s)
        signature = Signer(secret).sign(message_id, at, payload)
        headers: dict[bytes | str, bytes | str] = {
            "Content-Type": "application/json",
            "User-Agent": USER_AGENT,
            "Connection": "close",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(at.astimezone(UTC).timestamp())),
            "webhook-signature": signature,
        }
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._whole_s)
        try:
            with (
                httpcore.ConnectionPool(self._tls, network_backend=backend) as pool,
                pool.stream(
                    "POST", endpoint.url, headers=headers, content=payload.encode(), extensions={"timeout": timeouts}
                ) as answer,
            ):
                return _judged(answer.status)
        except httpcore.TimeoutException:
            return Outcome(error="The receiver took too long to answer.")
        except (httpcore.ConnectError, httpcore.NetworkError) as error:
            reason = "its certificate or TLS was not accepted" if _is_tls(error) else "the connection failed"
            return Outcome(error=f"The receiver could not be reached: {reason}.")
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, UnicodeError):
            return Outcome(error="The receiver did not answer in HTTP.")


def _judged(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome(status)
    if 300 <= status < 400:
        return Outcome(status, error="The receiver redirects, which is not followed.")
    if status == _GONE:
        return Outcome(status, error="The receiver says that it is gone.", final=True)
    return Outcome(status, error=f"The receiver answered {status}.")


def _is_tls(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


class _Pinned(httpcore.NetworkBackend):
    """Connects to addresses that were found before, whatever host it is asked for."""

    def __init__(self, addresses: Iterable[str], deadline: float) -> None:
        self._addresses = list(addresses)
        self._deadline = deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        error: Exception = httpcore.ConnectError("no address")
        for address in self._addresses:
            try:
                stream = self._backend.connect_tcp(address, port, min(CONNECT_S, _left_s(self._deadline)))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failure:
                error = failure
            else:
                return _Hurried(stream, self._deadline)
        raise error


class _Hurried(httpcore.NetworkStream):
    """A connection whose every step ends by one deadline: a byte now and then does not keep it."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        inner = self._stream.start_tls(ssl_context, server_hostname, _left_s(self._deadline))
        return _Hurried(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the time for this message is over")
    return left
