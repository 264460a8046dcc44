"""A page in a headless browser: runs a script on it when it has loaded, and gives back what the script returned."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NO_BROWSER = "needs a browser: chromium"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
_FIRST = """<script>
window.errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
const said = console.error;
console.error = (...words) => (errors.push(words.join(" ")), said(...words));
</script>"""
_LAST = """<script>
addEventListener("load", () => setTimeout(() => {
  const result = document.createElement("pre");
  result.id = "the-result";
  let value;
  try { value = (() => { %s })(); } catch (error) { errors.push(`in the test: ${error.stack}`); }
  result.textContent = JSON.stringify({ value, errors });
  document.body.replaceChildren(result);
}, 50));
</script>"""


def asked(page: Path, script: str, fragment: str = "", size: tuple[int, int] = (1400, 1000)) -> Any:
    """What a script, the body of a function, returns on the page; AssertionError if anything went wrong on it."""
    text = page.read_text("utf-8")
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(
        text.replace("<head>", f"<head>{_FIRST}", 1).replace("</body>", f"{_LAST % script}</body>"), "utf-8"
    )
    found = _run(probed, fragment, size, "--dump-dom")
    match = re.search(r'<pre id="the-result">(.*?)</pre>', found, re.DOTALL)
    assert match, found[-2000:]
    result = json.loads(html.unescape(match[1]))
    assert not result["errors"], result["errors"]
    return result["value"]


def screenshot(page: Path, to: Path, fragment: str, size: tuple[int, int]) -> None:
    """A picture of the page."""
    _run(page, fragment, size, f"--screenshot={to}")


def _run(page: Path, fragment: str, size: tuple[int, int], action: str) -> str:
    assert BROWSER is not None
    folder = page.parent / "profile"
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", action]
    command.append(f"{page.resolve().as_uri()}{f'#{fragment}' if fragment else ''}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
