"""A cluster that is not there is said at once: Ray alone tries for minutes and hears no Ctrl-C."""

import socket
import time

import pytest

from rein.errors import ConfigError
from rein.runtime.cluster import joined

pytest.importorskip("ray")


def test_a_port_where_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: no other process takes it
        address = f"127.0.0.1:{held.getsockname()[1]}"
        began = time.monotonic()
        with (
            pytest.raises(ConfigError, match=f"ray.address: {address} gives no cluster .*refused"),
            joined(address),
        ):
            pass
        assert time.monotonic() - began < 30
