"""A page as a browser sees it: headless Chromium without a network, a script of ours on top."""

import html
import json
import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DARK, LIGHT = 0, 1


def chromium():
    """The browser's path; skips the test when there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    return found


def look(page, folder, script, scheme=LIGHT):
    """Open a copy of a page; `script`, an async function's body, returns what it sees."""
    call = (
        "<script>addEventListener('load', async () => {"
        "const see = async () => {" + script + "};"
        "const seen = await see().catch(error => ({error: String(error)}));"
        "const place = document.createElement('pre'); place.id = 'seen';"
        "place.textContent = JSON.stringify(seen); document.body.append(place)})</script>"
    )
    copy = folder / "page.html"
    copy.write_text(page.read_text(encoding="utf-8") + call, encoding="utf-8")
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'browser'}", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000",
        "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert "error" not in seen, seen
    return seen
