"""Names of servers and of web pages, as the headers Host and Origin carry them, made comparable. No web framework here.

    split_host("LOCALHOST.:8000")              ("localhost", "8000")
    split_origin("https://chat.example.com")   ("https", "chat.example.com", "443")

Anything else than a name or an address with an optional port gives None: it is equal to nothing.
"""

from __future__ import annotations

import ipaddress
import re

PORTS = {"http": "80", "https": "443"}  # browsers leave these out


def split_host(text: str) -> tuple[str, str] | None:
    found = re.fullmatch(r"(?:\[([\w:.%-]+)\]|([\w.-]+))(?::(\d*))?", text, re.ASCII)
    return found and ((found[1] or found[2]).lower().removesuffix("."), found[3] or "")


def split_origin(text: str) -> tuple[str, str, str] | None:
    scheme, _, rest = text.lower().partition("://")
    place = split_host(rest)
    if place is None or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        return None
    return scheme, place[0], place[1] or PORTS.get(scheme, "")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
