"""The live page of a run: one HTML file that needs nothing but the run's own `/api/state`."""

import base64
import functools
import hashlib
from importlib.resources import files

from rayfcp.telemetry.style import STYLE

SCRIPTS = ("charts.js", "pictures.js", "live.js")


def live_page(_accept: str = "") -> tuple[str, bytes]:
    """Its type and body. It may run its own script and ask its own server, nothing else."""
    return "text/html; charset=utf-8", _page().encode()


@functools.cache
def _page() -> str:
    folder = files("rayfcp.telemetry") / "data"
    script = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": STYLE + (folder / "live.css").read_text(encoding="utf-8"), "script": script}
    page = (folder / "live.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page
