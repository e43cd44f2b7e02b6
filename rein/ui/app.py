"""The application: addresses in, pages out. It only reads, and shows every error as a sentence.

/                       all runs                 /run?name=            one run
/compare?run=&run=      several                  /rows?name=&file=     rows of a file
/row?name=&file=&row=   one row                  /static/              style, scripts, Plotly
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rein.errors import shown
from rein.ui import rows
from rein.ui.folder import Absent, Broken, Folder
from rein.ui.guard import Guard
from rein.ui.pages import Html, Pages
from rein.ui.runs import Runs, Standing
from rein.ui.style import css, plotly, script
from rein.ui.table import Query, Table, Tables

LONGEST_WORD = 500  # characters of a search
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'self' 'nonce-{nonce}'; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
Handler = Callable[[Request], Html]


class Ui:
    """The handlers. They run in threads; heavy reading of one file is done by one at a time."""

    def __init__(self, root: Path, standing: Standing) -> None:
        self.folder = Folder(root)
        self.pages = Pages(Runs(self.folder, standing))
        self.tables = Tables()

    def list(self, request: Request) -> Html:
        words = request.query_params
        order = "down" if words.get("order") == "down" else "up"
        return self.pages.all(_word(words, "q"), _word(words, "sort") or "name", order, words.getlist("run"))

    def run(self, request: Request) -> Html:
        return self.pages.run(_word(request.query_params, "name"))

    def compare(self, request: Request) -> Html:
        return self.pages.compare(request.query_params.getlist("run"))

    def rows(self, request: Request) -> Html:
        name, file, table = self._table(request)
        known = {"name", "file", "q", "sort", "order", "page"}
        known |= {f"{measure}_{end}" for measure in table.measures() for end in ("min", "max")}
        asked = {key: value[:LONGEST_WORD] for key, value in request.query_params.items() if key in known}
        query = query_of(asked, table)
        return self.pages.rows(name, file, table, query, _whole(asked.get("page", "")), asked)

    def row(self, request: Request) -> Html:
        name, file, table = self._table(request)
        words = request.query_params
        part = _whole(_word(words, "part"))
        return self.pages.row(name, file, table, _whole(_word(words, "row")), _word(words, "color"), part)

    def _table(self, request: Request) -> tuple[str, str, Table]:
        words = request.query_params
        name, file = self.pages.runs.known(_word(words, "name")), _word(words, "file")
        return name, file, rows.opened(self.folder, self.tables, name, file)

    def answer(self, request: Request, handler: Handler) -> Response:
        """A page, or the sentence in its place."""
        try:
            return _response(request, handler(request), 200)
        except Absent as error:
            return _response(request, self.pages.error("Not found", str(error)), 404)
        except Broken as error:
            return _response(request, self.pages.error("Cannot be shown", str(error)), 200)
        except Exception as error:  # a file that nobody thought of must not end the pages
            sentence = f"{type(error).__name__}: {shown(str(error), 200)}; what is shown here cannot be read"
            return _response(request, self.pages.error("Cannot be shown", sentence), 500)


def make_app(root: Path, standing: Standing, hosts: frozenset[str] | None = None) -> Guard:
    """The application behind its guard. `hosts`: names it may be called by; None, this machine's own."""
    ui = Ui(root, standing)

    def page(handler: Handler) -> Callable[[Request], Response]:
        return lambda request: ui.answer(request, handler)

    async def lost(request: Request, error: Exception) -> Response:
        return _response(request, ui.pages.error("Not found", "There is no such page."), 404)

    routes = [
        Route("/", page(ui.list)),
        Route("/run", page(ui.run)),
        Route("/compare", page(ui.compare)),
        Route("/rows", page(ui.rows)),
        Route("/row", page(ui.row)),
        Route("/static/style.css", lambda request: _static(request, css(), "text/css")),
        Route("/static/plotly.js", lambda request: _static(request, plotly(), "text/javascript")),
        *(
            Route(f"/static/{name}", lambda request, n=name: _static(request, script(n), "text/javascript"))
            for name in ("ui.js", "curves.js")
        ),
    ]
    handlers: Any = {404: lost}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts)


def query_of(asked: Mapping[str, str], table: Table) -> Query:
    """What the form says; what is no number is no bound. Raises Broken where a bound is none."""
    bounds = []
    for name in table.measures():
        least, most = (_bound(asked.get(f"{name}_{end}", ""), name) for end in ("min", "max"))
        if least is not None or most is not None:
            bounds.append((name, least, most))
    order = asked.get("sort", "")
    order = order if order in table.measures() else ""
    down = bool(order) and asked.get("order") != "up"
    return Query(asked.get("q", "").strip(), tuple(bounds), order, down)


def _bound(text: str, name: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise Broken(f"{name}: {shown(text)} is no number; write it like 0.5")
    return value


def _word(words: Any, name: str) -> str:
    return str(words.get(name, ""))[:LONGEST_WORD]


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _response(request: Request, page: Html, status: int) -> Response:
    """The page with its policy; nothing but a sign where the asker has this very page."""
    body = page.text.encode("utf-8", "replace")
    tag = f'"{hashlib.sha256(body.replace(page.nonce.encode(), b"")).hexdigest()[:32]}"'
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    headers = {
        "ETag": tag,
        "Cache-Control": "no-store",
        "Content-Security-Policy": POLICY.format(nonce=page.nonce),
    }
    return Response(body, status, headers, "text/html")


def _static(request: Request, body: bytes, kind: str) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, kind)
