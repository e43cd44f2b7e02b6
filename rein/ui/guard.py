"""Who may ask: pages of these names alone, read and nothing else. An ASGI application around another.

A web page elsewhere can make a browser ask 127.0.0.1, under a name of its own whose address it changes (DNS
rebinding), or from its own origin: the first is seen by the Host, the second by Origin and Sec-Fetch-Site.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rein.errors import shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_ADDRESS = 8000  # bytes of path and query
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}


class Guard:
    """`hosts` None: only this machine's own names. Otherwise those, and any address that is a number."""

    def __init__(self, app: App, hosts: frozenset[str] | None = None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS.items()]
            await send(message)

        refused = self.refuse(scope)
        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        status, sentence = refused
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        plain += [(b"allow", b"GET, HEAD")] if status == 405 else []
        await with_headers({"type": "http.response.start", "status": status, "headers": plain})
        await send({"type": "http.response.body", "body": f"{sentence}\n".encode("utf-8", "replace")})

    def refuse(self, scope: Message) -> tuple[int, str] | None:
        """Status and sentence of a refusal."""
        every = [(bytes(k).lower(), bytes(v).decode("latin-1")) for k, v in scope["headers"]]
        headers = dict(every)
        hosts = [value for key, value in every if key == b"host"]
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "These pages are only read."
        if len(hosts) != 1 or not self.knows(name_of(hosts[0])):
            name = shown(hosts[0]) if hosts else "no name"
            return 403, f"These pages are not called {name}; open the address that rein ui printed."
        origin = headers.get(b"origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return 403, "Another site asked for this page."
        site, mode = headers.get(b"sec-fetch-site", "none"), headers.get(b"sec-fetch-mode", "navigate")
        if site in ("cross-site", "same-site") and mode != "navigate":
            return 403, "Another site asked for this page."
        asked = len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
        return (414, "The address is too long.") if asked > LONGEST_ADDRESS else None

    def knows(self, name: str) -> bool:
        if name in LOOPBACK:
            return True
        return self.hosts is not None and (name in self.hosts or _is_number(name))


def name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    name, closing, _ = host.partition("]")
    return (name.removeprefix("[") if closing else host.partition(":")[0]).lower()


def _is_number(name: str) -> bool:
    """An address in numbers belongs to no one's name server."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
