"""The page of a report in a real browser: its tables, its images, and nothing fetched from anywhere."""

import re
import shutil
import subprocess

import lxml.html
import pytest
from PIL import Image
from report_tree import Tree

from fairseq_rskip.tools.report import figures

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed"),
]
# what the page says of itself once everything is loaded; the real page allows no scripts, the copy under test does
PROBE = """<script>
addEventListener("load", () => {  // images of the page's own bytes have their size by then
  const images = [...document.images];
  const said = document.createElement("output");
  said.id = "probe";
  const fetched = performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:"));
  const border = getComputedStyle(document.querySelector(".warning")).borderLeftWidth;
  const fits = document.documentElement.scrollWidth <= innerWidth;
  said.textContent = [images.map(image => image.naturalWidth).join(","), fetched.length, fits, border].join(" ");
  document.body.append(said);
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page with ü")
    tree = Tree(folder)
    tree.table()
    tree.table("table2")
    for name in ("table1", "table2"):
        plan = tree.plan(name, scale=0.5 if name == "table2" else 1.0)
        tree.finish(plan, "1xSkip", {1: 6.0, 2: 6.4, 3: 6.2})
        tree.finish(plan, "1xSkip+LN", {1: 7.0, 2: 7.5, 3: 7.2})
    tree.fail(plan, "2rSkip+LN", 1, "<script>alert(1)</script> & more")
    (tree.out / "figures").mkdir()
    Image.new("RGB", (30, 20)).save(tree.out / "figures" / "depth.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "analyse", lambda result, name, *_: figures.Figure(tree.out, name, "", "", "not asked"))
        return tree.report() / "report.html"


def browse(page, *words):
    """chromium's (stdout, stderr); it reaches no host."""
    profile = page.parent / "profile"
    always = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr"]
    always += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"]
    done = subprocess.run([BROWSER, *always, *words, page.as_uri()], capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8"), done.stderr.decode("utf-8", "replace")


def test_the_page_in_the_browser(page, tmp_path):
    copy = page.with_name("copy.html")
    text = page.read_text("utf-8")
    probed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', PROBE, text)
    assert probed != text
    copy.write_text(probed, encoding="utf-8")
    dom, log = browse(copy, "--dump-dom", "--window-size=500,900")
    widths, fetched, fits, styled = re.search(r'<output id="probe">(.*?)</output>', dom).group(1).split()
    assert len(widths.split(",")) == 3 and all(int(width) > 0 for width in widths.split(","))
    assert (fetched, fits, styled) == ("0", "true", "4px")
    assert "CONSOLE" not in log


def test_the_pages_tables(page):
    dom, log = browse(page, "--dump-dom")
    assert "CONSOLE" not in log  # nor has its own policy anything to object to
    html = lxml.html.fromstring(dom)
    captions = html.xpath("//caption/text()")
    whole, part = ([[cell.text_content() for cell in row] for row in table.iter("tr")] for table in html.iter("table"))
    assert captions[1].endswith("(not the paper's experiment)")
    assert [row[0] for row in whole] == ["row", "1xSkip", "2xSkip", "1xSkip+LN", "2rSkip+LN"]
    assert whole[3][2:6] == ["7.23 \u00b1 0.25", "3", "8.00", "\u22120.77"]
    assert part[0][4] == "paper (full scale, cifar10)" and "ours \u2212 paper" not in part[0]
    assert part[4][2] == "failed; not run"
    assert "2rSkip+LN: seed 1 failed: <script>alert(1)</script> & more; seeds 2, 3 not run." in html.text_content()
    assert not html.xpath("//th[not(@scope)]")
    addresses = html.xpath("//@src | //@href | //@srcset | //@action")
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert {address[1:] for address in addresses if address[0] == "#"} <= set(html.xpath("//@id"))


def test_a_screenshot(page, tmp_path):
    for words in ((), ("--blink-settings=preferredColorScheme=0",)):
        picture = tmp_path / "page.png"
        browse(page, f"--screenshot={picture}", "--window-size=900,1200", *words)
        with Image.open(picture) as image:
            grey = image.convert("L")
            assert image.width == 900 and len(grey.getcolors()) > 30
            assert (grey.getpixel((2, 2)) > 200) == (not words)  # a light page, and a dark one
