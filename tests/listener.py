"""A server on this machine that keeps what is posted to it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Listener(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; answers as its server is told to."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.headers["Content-Type"], body))  # type: ignore[attr-defined]
        if self.server.nonsense:  # type: ignore[attr-defined]
            self.wfile.write(b"\x00\x01 no HTTP at all\r\n\r\n")
        else:
            self.send_response(self.server.code)  # type: ignore[attr-defined]
            self.end_headers()

    def log_message(self, *given: Any) -> None:
        pass


@contextmanager
def listening(code: int = 200, *, nonsense: bool = False) -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    server.heard, server.code, server.nonsense = [], code, nonsense
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
