"""The application on a port until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

import uvicorn

from rein.errors import ConfigError, Terminated
from rein.tracking.console import Console
from rein.ui.app import make_app
from rein.ui.runs import Standing

LOOPBACK, PORT = "127.0.0.1", 7346
WAITING = 128  # connections that the system holds for us


def serve(root: Path, standing: Standing, console: Console, host: str, port: int) -> None:
    """Serve the pages; raises ConfigError where host or port cannot be had."""
    with listener(host, port) as opened:
        own = is_loopback(opened)
        hosts = None if own else frozenset({host.lower(), socket.gethostname().lower()})
        app = make_app(root, standing, hosts)
        real = opened.getsockname()[1]
        named = f"[{host}]" if ":" in host else host
        console.say(f"ui: {root}: http://{named}:{real} (Ctrl-C ends it)")
        if not own:
            console.say(
                f"warning: --host {host}: whoever reaches this machine can read these runs; there is no login"
            )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2
        )
        with suppress(KeyboardInterrupt, Terminated):  # uvicorn ends in order, then gives the signal on
            uvicorn.Server(config).run(sockets=[opened])
        console.say("ui: ended")


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens, taken before anything is started."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port: {port} is no port; give one from 1 to 65535, or 0 for a free one")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: {host} is no address of this machine ({error}); leave it out") from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(WAITING)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port: {port} is in use; give another --port, or --port 0 for a free one"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host: {host} is no address of this machine; leave it out") from error
        raise ConfigError(f"--port: {host}:{port} cannot be had ({os.strerror(error.errno or 0)})") from error
    return opened


def is_loopback(opened: socket.socket) -> bool:
    return ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback
