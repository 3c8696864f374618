"""The page's own files: /, /static/FILE, and /source/nanovllm/FILE.py, to which it links. No key, no engine here."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from nanovllm.server.errors import ApiError

PAGE = Path(__file__).parent / "page"
PACKAGE = Path(__file__).parent.parent
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".woff2": "font/woff2",
}
# Nothing from elsewhere, no inline scripts: text that a model wrote cannot become one.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """The files are listed once: the name in a request is looked up in the list, never opened as a path."""
    files = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in MEDIA_TYPES}

    def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"no file {name!r:.80} belongs to the page")
        return Response(files[name].read_bytes(), headers=PAGE_HEADERS, media_type=MEDIA_TYPES[files[name].suffix])

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return file("index.html")

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        return file(name)

    # What each thing of the page links to. As text: a browser must never run or render it.
    sources = {f"nanovllm/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")}

    @app.get("/source/{name:path}", include_in_schema=False)
    async def source(name: str) -> Response:
        if name not in sources:
            raise ApiError(404, f"no file {name!r:.80} belongs to this package")
        return Response(sources[name].read_bytes(), headers=PAGE_HEADERS, media_type="text/plain; charset=utf-8")
