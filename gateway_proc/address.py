"""Where the gateway listens. Light, because launch.py asks too, before it starts anything."""

import ipaddress
import socket
from typing import Any

from common.config import KEYS_VARIABLE, ConfigError, HttpConfig

Address = tuple[socket.AddressFamily, socket.SocketKind, int, Any]  # the last one is for `bind`


def find_address(http: HttpConfig, *, with_keys: bool) -> Address:
    """What `--host` and `--port` stand for. Raises ConfigError where that is nothing, or open to others without keys:
    the address decides that the host has now, not what it is called."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {http.host}: {error.strerror or error}") from None
    except UnicodeError:
        raise ConfigError(f"--host {http.host}: no name of a host") from None
    if not with_keys and not _is_loopback(str(address[0])):
        problem = f"--host {http.host} is open to others: API keys are required (--api-key-file or {KEYS_VARIABLE})"
        raise ConfigError(problem)
    return family, kind, protocol, address


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
