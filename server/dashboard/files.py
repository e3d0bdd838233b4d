"""The live page's files: what a browser gets of them, and nothing else."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "static"
PAGE_PATH: Final = "/dashboard"
MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES: Final = (
    "charts.js",
    "chat.js",
    "dashboard.css",
    "dom.js",
    "favicon.svg",
    "figures.js",
    "main.js",
    "pool.js",
    "stream.js",
    "timeline.js",
    "verdict.js",
)
"""Beside `index.html`."""
FILE_PATHS: Final = frozenset({PAGE_PATH, *(f"{PAGE_PATH}/{name}" for name in FILES)})
"""They need no key."""

HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""No script or style but those of the files, and nobody's frame."""
