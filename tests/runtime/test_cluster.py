"""A cluster that is not there is said at once: Ray alone tries for minutes and hears no Ctrl-C."""

import socket
import threading
import time

import pytest

from rein.errors import ConfigError
from rein.runtime import cluster
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


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_a_port_where_something_else_listens_is_refused(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it says nothing at all, where Ray would wait for ever."""
    monkeypatch.setattr(cluster, "HEARD", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                if answer is None:
                    time.sleep(2)
                else:
                    peer.recv(100)
                    peer.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(ConfigError, match=f"ray.address: {address} gives no cluster"), joined(address):
            raise AssertionError("there is no cluster")
        serving.join()
