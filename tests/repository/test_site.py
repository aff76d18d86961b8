"""The site: what its build refuses, and, as slow tests, all of it in a browser."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ssmzoo.recipe import Recipe, Section

pytestmark = [
    pytest.mark.xdist_group("site"),
    # between Sphinx and its extensions
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "eval/site/build.py"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None
)
INDEX = """```{toctree}
other
tables
eval/LOG
model_cards/longhorn-demo
model_cards/small/tiny/README
eval/recipes/reference
```
"""


@pytest.fixture(scope="module")
def site():
    """``eval/site/build.py`` as a module."""
    spec = spec_from_file_location("site_build", BUILD)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    """A repository with two pages, a card and a ledger, beside an earlier site."""
    root = tmp_path / "repository"
    files = {
        "eval/site/index.md": INDEX,
        "README.md": "# One\n\n[Other](other.md#second-part), [code](code.py), `[no](link)`\n",
        "other.md": "# Two\n\n## Second part\n\n    [none](here)\n",
        "eval/LOG.md": "# Log\n",
        "code.py": "pass\n",
        "pyproject.toml": "[project]\n",
        "eval/results/small.csv": "model,value\n<b>,0.123456\nssmzoo x,1000\n",
        "eval/results/small.png": "",
        "build/site/index.html": "the earlier site",
        "build/site/objects.inv": "",
        "model_cards/small/tiny/README.md": "---\nlibrary_name: x\n---\n# Tiny\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for kind in ("md", "json", "png"):
        shutil.copy(ROOT / f"model_cards/longhorn-demo.{kind}", root / "model_cards")
    return root


def change(root, name, old, new):
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))


BROKEN = {
    "a card's metadata": (
        ("model_cards/longhorn-demo.md", "library_name: transformers", "library_name: ["),
        r"longhorn-demo\.md: not valid YAML",
    ),
    "a card's facts": (
        ("model_cards/longhorn-demo.json", "{", "{{"),
        r"longhorn-demo\.json is corrupt",
    ),
    "a small model's card": (
        ("model_cards/small/tiny/README.md", "---\nlibrary_name: x\n---\n", ""),
        r"tiny/README\.md: a card must begin with metadata",
    ),
    "a page that is not in the index": (
        ("eval/site/index.md", "other\n", ""),
        r"other\.md: .*isn't included in any toctree",
    ),
    "a page in the index that is not there": (
        ("eval/site/index.md", "other\n", "other\nabsent\n"),
        r"index\.md:\d+: .*nonexisting document.*absent",
    ),
    "a link to no file": (
        ("README.md", "(code.py)", "(cdoe.py)"),
        r"index\.md: the link \[code\]\(cdoe\.py\) leads to nothing",
    ),
    "a link to no heading": (
        ("README.md", "#second-part", "#secondpart"),
        r"index\.md:\d+: .*secondpart",
    ),
    "a ledger that was cut": (
        ("eval/results/small.csv", "0.123456", '0.123456,"x'),
        r"small\.csv: row 2 must have the 2 cells of the first, got 3",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_one_line_and_the_earlier_site_stays(what, repository, site, capsys):
    edit, message = BROKEN[what]
    change(repository, *edit)
    assert site.main(["--root", str(repository)]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(rf"site: .*{message}.*\n", said), said
    assert (repository / "build/site/index.html").read_text() == "the earlier site"
    assert [path.name for path in (repository / "build").iterdir()] == ["site"]


def test_a_site_replaces_the_earlier_one_and_its_links_lead_somewhere(repository, site):
    assert site.main(["--root", str(repository)]) == 0
    built = repository / "build/site"
    page = (built / "index.html").read_text()
    assert "the earlier site" not in page
    assert 'href="other.html#second-part"' in page
    assert "code.py" not in page  # no address is known that it could lead to
    assert "[no](link)" in page
    tables = (built / "tables.html").read_text()
    assert '<td class="number" data-value="0.123456" title="0.123456">0.1235</td>' in tables
    assert "<td>&lt;b&gt;</td>" in tables
    assert "<td><code>ssmzoo x</code></td>" in tables
    assert (built / "_images/small.png").exists()
    for card in ("longhorn-demo", "small/tiny/README"):
        assert "library_name" not in (built / f"model_cards/{card}.html").read_text()


@pytest.mark.long
def test_the_zoos_table_gets_a_picture_of_each_problem_that_is_searched(repository, site, capsys):
    (repository / "eval/zoo.md").write_text("# Zoo\n")
    change(repository, "eval/site/index.md", "other\n", "other\neval/zoo\n")
    ledger = repository / "eval/results/sweep.csv"
    head, *lines = (ROOT / "eval/results/sweep.csv").read_text().splitlines(keepends=True)
    searched = [line for line in lines if line.startswith("mqar 8,s4,64,")]
    begun = [line for line in lines if line.startswith("selective copying,s4,64,0.001,0,")]
    assert len(begun) == 1
    ledger.write_text("".join([head, *searched, *begun]))
    assert site.main(["--root", str(repository)]) == 0
    page = (repository / "build/site/eval/zoo.html").read_text()
    assert re.findall(r'src="\.\./_images/([\w-]+\.png)"', page) == ["mqar-8.png"]
    ledger.write_text("".join([head, *searched]).replace("accuracy,0.", "accuracy,O.", 1))
    assert site.main(["--root", str(repository)]) == 1
    assert re.search(r"sweep\.csv, line 2, is cut or wrong", capsys.readouterr().err)
    assert (repository / "build/site/eval/zoo.html").read_text() == page


def test_a_folder_of_something_else_is_no_earlier_site(repository, site, capsys):
    thesis = repository / "thesis"
    thesis.mkdir()
    (thesis / "index.html").write_text("mine")
    assert site.main(["--root", str(repository), "--output", str(thesis)]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"site: output must be absent, empty or an earlier site, got .*\n", said)
    assert [path.name for path in thesis.iterdir()] == ["index.html"]


def test_a_root_that_is_no_repository_is_one_line(tmp_path, site, capsys):
    assert site.main(["--root", str(tmp_path / "absent")]) == 1
    assert re.fullmatch(r"site: .*README\.md.*\n", capsys.readouterr().err)


def test_a_commit_that_looks_like_a_number_stays_a_word(site):
    assert site._cell("12e4567") == "<td>12e4567</td>"
    assert site._cell("nan") == "<td>nan</td>"


def test_other_files_are_at_the_repositorys_address(repository, site):
    urls = '[project.urls]\nRepository = "https://example.org/zoo/"\n'
    (repository / "pyproject.toml").write_text(f"[project]\n{urls}")
    page = "[code](code.py) [w](x.md)"
    text = site.with_links(repository, repository, "README.md", page, {"x.md": ""})
    assert text == "[code](https://example.org/zoo/blob/main/code.py) [w](x.md)"


def fields_of(section, place=""):
    for name, field in section.model_fields.items():
        yield f"{place}.{name}" if place else name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                inner = f"{place}.{name}".removeprefix(".")
                yield from fields_of(
                    kind, f"{inner}.NAME" if "dict" in str(field.annotation) else inner
                )


def test_the_recipes_reference_has_every_field_with_its_meaning(site):
    place, rows = "", {}
    for line in site.recipe_reference().splitlines():
        if line.startswith("## "):
            place = line[3:]
        elif line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            rows[f"{place}.{name.strip('`')}"] = cells
    expected = [name for name in fields_of(Recipe) if "." in name]
    assert len(expected) > 50
    assert set(rows) == set(expected)
    assert [name for name, cells in rows.items() if len(cells) != 3 or not cells[-1]] == []
    assert rows["train.batch_size"][:2] == ["whole number", "needed"]
    assert rows["data.workers"][:2] == ["whole number", "`0`"]


class Addresses(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        kinds = ("src", "srcset", "href")[: 3 if attrs.get("rel") in ("stylesheet", "icon") else 2]
        self.found += [attrs[kind] for kind in kinds if attrs.get(kind)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The repository's own site."""
    output = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, BUILD, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.slow
def test_the_whole_site_is_built_and_asks_no_other_host(whole):
    pages = sorted(whole.rglob("*.html"))
    assert len(pages) > 50
    for name in ("api/ssmzoo", "api/modeling", "api/kernels", "tables", "plugins/ssmzoo_h3/README"):
        assert whole / f"{name}.html" in pages
    for page in pages:
        assert [url for url in Addresses(page.read_text()).found if "//" in url] == [], page
    kernels = (whole / "api/kernels.html").read_text()
    assert 'id="ssmzoo_kernels.longhorn_scan"' in kernels


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pages_fit_phones_and_desktops_and_tables_sort_and_filter(whole, tmp_path):
    pages = [path.relative_to(whole).as_posix() for path in sorted(whole.rglob("*.html"))]
    seen = browse(whole, [page for page in pages if "_static" not in page], tmp_path)
    assert len(seen["pages"]) == 2 * len(pages)
    assert [page for page in seen["pages"] if page["wider"] > 0] == []
    assert [page for page in seen["pages"] if page["errors"] or page["foreign"]] == []
    ledger = seen["ledger"]
    assert ledger["rising"] == sorted(ledger["rising"])
    assert ledger["falling"] == ledger["rising"][::-1]
    assert len(set(ledger["rising"])) > 10
    assert 0 < len(ledger["filtered"]) < len(ledger["rising"])
    assert all("delay" in name and "rtf" in name for name in ledger["filtered"])
    assert ledger["count"] == f"{len(ledger['filtered'])} of {len(ledger['rising'])} rows"


PROBE = """<!doctype html><body style="margin:0"><script>
const pages = PAGES, seen = {pages: []};
const frame = document.body.appendChild(document.createElement("iframe"));
frame.style.border = 0;
const load = (page, width) => new Promise((done) => {
  frame.style.width = `${width}px`; frame.style.height = "900px";
  frame.onload = () => done(frame.contentWindow);
  frame.src = page;
});
const settled = (inside) => new Promise((done) =>
  inside.requestAnimationFrame(() => inside.setTimeout(done, 0)));
(async () => {
  for (const width of [390, 1280]) for (const page of pages) {
    const inside = await load(page, width);
    await settled(inside);
    const root = inside.document.documentElement;
    const wider = root.scrollWidth - root.clientWidth;
    seen.pages.push({page, width, wider, errors: inside.siteErrors,
      foreign: inside.performance.getEntriesByType("resource").map((entry) => entry.name)
        .filter((name) => !name.startsWith(location.origin))});
  }
  const inside = await load("tables.html", 390);
  const box = inside.document.querySelector(".ledger#table-families");
  const cells = (column) =>
    [...box.querySelectorAll("tbody tr:not([hidden])")].map((row) => row.cells[column]);
  const heads = [...box.querySelectorAll("th button")];
  const head = heads.find((button) => button.textContent === "value");
  head.click();
  const rising = cells(2).map((cell) => Number(cell.dataset.value));
  head.click();
  const falling = cells(2).map((cell) => Number(cell.dataset.value));
  const words = box.querySelector("input");
  words.value = "delay RTF";
  words.dispatchEvent(new inside.Event("input"));
  seen.ledger = {rising, falling, filtered: cells(0).map((cell) => cell.textContent),
    count: box.querySelector("output").textContent};
})().catch((error) => { seen.failed = String(error); })
  .finally(() => fetch("/seen", {method: "POST", body: JSON.stringify(seen)}));
</script>"""
# first in each page: what goes wrong there, in scripts, files and on the console
WATCH = b"""<head><script>window.siteErrors = [];
const wrong = (what) => siteErrors.push(String(what));
addEventListener("error", ({message, target}) => wrong(message ?? target.src ?? target.href), true);
addEventListener("unhandledrejection", (event) => wrong(event.reason));
for (const kind of ["error", "warn"]) console[kind] = (...words) => wrong(words.join(" "));
</script>"""


def browse(site, pages, tmp_path):
    """Open every page in Chromium at two widths, and return what the probe saw."""
    seen, finished = {}, threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            path = Path(site, self.path.split("?")[0].lstrip("/"))
            if self.path == "/probe":
                self.answer(PROBE.replace("PAGES", json.dumps(pages)).encode())
            elif path.suffix == ".html" and path.is_file():
                self.answer(path.read_bytes().replace(b"<head>", WATCH, 1))
            else:
                super().do_GET()

        def do_POST(self):
            seen.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b"")
            finished.set()

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    handler = partial(Handler, directory=site)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(dir=tmp_path, ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
            "--disable-background-networking --disable-component-update --window-size=1400,1000 "
            "--remote-debugging-port=0"  # without it headless Chromium ends after one page
        )
        address = f"http://127.0.0.1:{server.server_port}/probe"
        browser = subprocess.Popen(
            [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert finished.wait(600), "Chromium did not look at all pages"
        finally:
            browser.terminate()
            browser.wait(30)
            server.shutdown()
    assert "failed" not in seen, seen["failed"]
    return seen
