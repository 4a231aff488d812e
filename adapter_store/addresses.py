"""Which addresses of the network the store may connect to on a caller's behalf."""

import ipaddress
from typing import TypeAlias

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

# Metadata services of clouds that are not link-local.
_METADATA = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"))
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_allowed(text: str, may_be_private: bool) -> bool:
    """Whether an address is public; with `may_be_private` also one of a private network or of this machine.

    Never one that is link-local, of a cloud's metadata service, multicast, unspecified or reserved, however it is
    written.
    """
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(_is_allowed(one, may_be_private) for one in (address, *_embedded(address)))


def _is_allowed(address: Address, may_be_private: bool) -> bool:
    if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if may_be_private and (address.is_private or address.is_loopback):
        return not (isinstance(address, ipaddress.IPv4Address) and address.is_reserved)
    return address.is_global


def _embedded(address: Address) -> list[Address]:
    """The IPv4 addresses inside an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address] = [one for one in (address.ipv4_mapped, address.sixtofour) if one is not None]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found
