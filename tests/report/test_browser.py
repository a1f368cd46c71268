"""The page in a real browser: silent console, nothing fetched, and no wider than a phone."""

import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), "")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")]

PHONE = """<body><iframe src="report.html" width="390" height="5000"></iframe><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const inner = page.documentElement;
  const small = [...page.querySelectorAll("figure img")]
    .filter(plot => plot.getBoundingClientRect().width < 300).length;
  document.title = "SIZES " + [inner.scrollWidth, inner.clientWidth, small].join(" ");
}</script></body>"""


def opened(page, folder):
    """The page's document after loading, and what the browser said."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    options += ["--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    done = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(measured):
    return measured / "7_report" / "report.html"


def test_the_console_stays_silent_and_plots_are_there(page, tmp_path):
    pytest.importorskip("matplotlib")
    document, said = opened(page, tmp_path)
    assert said == []
    assert document.count("<img ") == 5


def test_a_page_that_would_load_something_would_be_seen(page, tmp_path):
    source = page.read_text().replace("<h1>", '<img src="http://127.0.0.1:9/a.png"><h1>')
    (tmp_path / "other.html").write_text(source)
    _, said = opened(tmp_path / "other.html", tmp_path)
    assert any("Content Security Policy" in line for line in said)


def test_nothing_is_wider_than_a_phone_and_plots_fill_it(page, tmp_path):
    (page.parent / "phone.html").write_text(PHONE)
    document, _ = opened(page.parent / "phone.html", tmp_path)
    width, room, small = map(int, re.search(r"SIZES (\d+) (\d+) (\d+)", document).groups())
    assert room > 300
    assert width <= room
    assert small == 0
