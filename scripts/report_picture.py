"""Take the README's picture of a report: desktop beside phone, in headless Chromium.

    python scripts/report_picture.py quickstart-run/report.html docs/images/report.png

Needs Chromium, and Pillow, which matplotlib brings along.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

HEIGHT = 1320
DESKTOP, PHONE, GAP = 860, 390, 12
COLOURS = 256
"""Colours of the picture; a page has few, which keeps the file small."""

SAID = r"goes from ([\d.]+) to ([\d.]+):"
"""The page's sentence with the perplexity of the dense model and of the export."""

SHOWN = ("alignment", "load-of-the-experts", "other-numbers-of-active-experts", "benchmark-tasks")
"""Anchors of sections for the phone; the first that the page has is shown."""


def main(page: Path, picture: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit("no Chromium is installed")
    source = page.read_text(encoding="utf-8")
    anchors = re.findall(r'<section id="([^"]*)"', source)
    anchor = next((name for name in SHOWN if name in anchors), anchors[0])
    address = page.resolve().as_uri()
    frames = [
        f'<iframe src="{address}" width="{DESKTOP}" height="{HEIGHT}"></iframe>',
        f'<iframe src="{address}#{anchor}" width="{PHONE}" height="{HEIGHT}"></iframe>',
    ]
    style = f"body{{margin:0;background:#8b949e;display:flex;gap:{GAP}px}}iframe{{border:0}}"
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wrapper, shot = Path(folder, "both.html"), Path(folder, "shot.png")
        wrapper.write_text(f"<style>{style}</style><body>{''.join(frames)}</body>")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--window-size={DESKTOP + GAP + PHONE},{HEIGHT}", f"--screenshot={shot}"]
        options += [f"--user-data-dir={folder}/profile", wrapper.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        known = PngInfo()  # a test compares it with the README's numbers
        known.add_text("perplexity", " ".join(re.findall(SAID, source)[0]))
        image.save(picture, optimize=True, pnginfo=known)
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
