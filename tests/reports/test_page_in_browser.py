"""The page in headless Chromium (Debian: apt install chromium): it fits screens, prints, and works by keyboard."""

import json
import re
import shutil
import subprocess

import pytest
from support.quick import thorough_but
from support.toy_graphs import decoder, decoder_costs

from lowtide.reports.html import html_report
from lowtide.reports.trade_off import trade_off
from lowtide.solvers.dispatch import solve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")

# Written into the page's title once it is laid out: what a reader would meet.
PROBE = """<script>
const seen = {
  width: window.innerWidth,
  overflow: [...document.querySelectorAll("h1, h2, p, ul, svg, .tiles, .wide, dl")]
    .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.className || e.tagName),
  charts: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width > 0).length,
  smallest: Math.min(...[...document.querySelectorAll("svg text")].filter(e => e.getBoundingClientRect().width > 0)
    .map(e => e.getBoundingClientRect().height)),
  dark: getComputedStyle(document.body).backgroundColor,
  unreachable: [...document.querySelectorAll(".wide")].filter(e => e.tabIndex !== 0).length,
  labels: [...document.querySelectorAll("text.label")].map(e => e.getBoundingClientRect())
    .filter(r => r.width > 0).map(r => [r.left, r.top, r.right, r.bottom]),
};
document.title = JSON.stringify(seen);
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    graph = decoder(2)
    costs = decoder_costs(graph)
    front = trade_off(graph, costs, points=4)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_report(solve(graph, costs, method="full"), graph, costs=costs, front=front))
    return path


def run(*arguments):
    # No network: a request to anywhere fails.
    quiet = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )
    done = subprocess.run([CHROMIUM, *quiet, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def laid_out(page, *, width=1000, dark=False):
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    found = run(f"--window-size={width},900", *scheme, "--dump-dom", f"file://{probed}")
    return json.loads(re.search(r"<title>(.*?)</title>", found, re.DOTALL)[1])


@pytest.mark.parametrize("width", thorough_but((500,), (1000, 500)))
def test_the_page_fits_its_screen_and_its_charts_can_be_read(page, width):
    seen = laid_out(page, width=width)

    assert seen["width"] == width and seen["overflow"] == []
    assert seen["charts"] == 2 and seen["smallest"] >= 10
    assert seen["unreachable"] == 0


@pytest.mark.parametrize("width", thorough_but((500,), (1000, 500)))
def test_no_name_in_the_trade_off_lies_over_another(page, width):
    labels = laid_out(page, width=width)["labels"]

    assert len(labels) >= 3
    for i, (left, top, right, bottom) in enumerate(labels):
        for other in labels[i + 1 :]:
            across = min(right, other[2]) - max(left, other[0])
            down = min(bottom, other[3]) - max(top, other[1])
            assert across <= 1 or down <= 3  # boxes hold the room under the letters too


def test_the_page_is_dark_where_the_reader_wants_it(page):
    assert laid_out(page)["dark"] == "rgb(255, 255, 255)"
    assert laid_out(page, dark=True)["dark"] == "rgb(20, 24, 29)"


def test_the_page_prints(page, tmp_path):
    run(f"--print-to-pdf={tmp_path / 'report.pdf'}", f"file://{page}")

    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
