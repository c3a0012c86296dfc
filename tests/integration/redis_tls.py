"""A Redis behind TLS: a front with a certificate of its own for the loopback, which passes bytes on. Knows no test."""

import contextlib
import ipaddress
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@contextlib.contextmanager
def tls_front(port: int, folder: Path) -> Iterator[tuple[int, Path]]:
    """The port that speaks TLS for `port`, and the file of the certificate that signs it."""
    certificate = _certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, folder / "tls.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, port), daemon=True).start()
        yield listener.getsockname()[1], certificate


def _certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "tls.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return folder / "tls.pem"


def _accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, port), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with (
        contextlib.suppress(OSError),
        client,
        socket.create_connection(("127.0.0.1", port)) as redis,
        context.wrap_socket(client, server_side=True) as spoken,
        selectors.DefaultSelector() as either,
    ):
        either.register(spoken, selectors.EVENT_READ, redis)
        either.register(redis, selectors.EVENT_READ, spoken)
        while True:
            for key, _ in either.select():
                said = key.fileobj.recv(65_536)  # type: ignore[union-attr]
                if not said:
                    return
                key.data.sendall(said)
