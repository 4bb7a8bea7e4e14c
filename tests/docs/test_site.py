"""The site, built and read in a browser: no link leads nowhere, and its search finds the right page first."""

from __future__ import annotations

import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin

import built_site
import pytest
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("site"),
]

QUESTIONS = {
    "FSDP": "docs/guide/processes.html",
    "max_time": "docs/guide/preemption.html",
    "on_preempt": "docs/guide/preemption.html",
    "SIGTERM": "docs/guide/preemption.html",
    "DistributedSampler": "docs/guide/processes.html",
    "number of workers": "docs/guide/data.html",
    "remote": "docs/guide/remote.html",
    "S3": "docs/recipes/remotes.html",
    "learning rate": "docs/guide/changing.html",
    "strict=False": "docs/guide/weights.html",
    "notebook": "docs/recipes/colab.html",
    "early stopping": "docs/guide/going-back.html",
    "progress bar": "docs/guide/output.html",
    "autosave": "docs/guide/autosave.html",
    "map_location": "docs/guide/resuming.html",
    "ModelCheckpoint": "docs/looking-for.html",
    "PendingSave": "docs/api.html",
    "StateMismatch": "docs/errors.html",
    "resumable prune": "docs/cli.html",
}
"""What people look for, and the page that has to come first."""


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and not re.match(r"\w+:", value):
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site.build(tmp_path_factory.mktemp("built") / "site")


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    """A browser at the site's first page, as a server on loopback gives it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # Its sandbox refuses root, who tests in a container
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        page.set_default_timeout(60_000)
        yield page
        browser.close()
    server.shutdown()
    server.server_close()


def test_no_link_of_the_site_leads_nowhere(site: Path) -> None:
    pages = {path.as_uri(): Links(path.read_text()) for path in site.rglob("*.html") if path.stem != "404"}
    dead = []
    for address, found in pages.items():
        for link in found.links:
            target, anchor = urldefrag(urljoin(address, link))
            is_there = unquote(anchor) in pages[target].anchors if target in pages else not anchor
            if not (is_there and Path(unquote(target.removeprefix("file://"))).exists()):
                dead.append((address, link))

    assert len(pages) > 100
    assert dead == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_right_page_first(page: Page, question: str) -> None:
    page.goto(f"{page.url.partition('?')[0]}?q={quote(question)}")
    first = page.locator(".md-search-result__item a.md-search-result__link").first

    first.wait_for(state="attached")
    address = first.evaluate("link => new URL(link.href).pathname")

    assert address.lstrip("/") == QUESTIONS[question]
