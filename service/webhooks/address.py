"""Which address a webhook's URL leads to, and whether the service may connect there. Must not connect anywhere.

A name is resolved once, and what is returned is what is connected to: a name that resolves to something else a moment
later changes nothing.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from kvalign.errors import ConfigInvalid

Resolver = Callable[[str, int], list[str]]

# They stand for an IPv4 address behind a translator, which may reach what we may not (RFC 6052, RFC 8215).
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_REMEDY = "Give the https URL of a server that the whole Internet can reach."


class WebhookRefused(ConfigInvalid):
    """The service does not connect to where this URL leads."""


@dataclass(frozen=True)
class Endpoint:
    """A URL and the addresses that were found fit to connect to, in the resolver's order."""

    url: str
    host: str
    port: int
    addresses: tuple[str, ...]


def system_resolver(host: str, port: int) -> list[str]:
    """Raises OSError, ValueError (UnicodeError) for names that cannot be one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def resolve_endpoint(url: str, *, allow_private: bool, resolve: Resolver = system_resolver) -> Endpoint:
    """Where to deliver. Blocks on the name server.

    allow_private  the operator lets webhooks reach private addresses, and http
    Raises WebhookRefused with the fact, unless every address of the host may be connected to.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" and not allow_private:
        raise WebhookRefused("webhook.url is not https.", _REMEDY)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = resolve(host, port)
    except (OSError, ValueError):
        addresses = []
    if not addresses:
        raise WebhookRefused(f"webhook.url: the host '{host[:200]}' has no address.", "Check the host's name.")
    if not allow_private and not all(_is_public(address) for address in addresses):
        # Without the address: it would tell strangers how names resolve inside this network.
        raise WebhookRefused(
            f"webhook.url: the host '{host[:200]}' has an address that is not on the public Internet.", _REMEDY
        )
    return Endpoint(url, host, port, tuple(addresses))


def _is_public(text: str) -> bool:
    """Whether anybody on the Internet could connect there too.

    >>> [_is_public(a) for a in ("93.184.215.14", "127.0.0.1", "10.1.2.3", "::ffff:10.0.0.1", "64:ff9b::7f00:1")]
    [True, False, False, False, False]
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return isinstance(address, IPv4Address) or not _stands_for_another(address)


def _stands_for_another(address: IPv6Address) -> bool:
    """Mapped, 6to4, Teredo, translated and site-local addresses: each may lead back inside."""
    return (
        address.ipv4_mapped is not None
        or address.sixtofour is not None
        or address.teredo is not None
        or address.is_site_local
        or any(address in network for network in _TRANSLATED)
    )
