"""`make docs`: the site builds without a warning and without a network, and every link and public name is there."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from places import ROOT
from process_state import run

sys.path.insert(0, str(ROOT / "docs"))
from public_names import PACKAGES

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(280)]

# An interpreter that fails to look up a host or to connect, and that runs Sphinx. Unix sockets are allowed. A third of
# its time is spared: no index for the search is made, garbage is rarely collected, and the 140 pages of classes and
# functions, of which no contents list has one, get the navigation of the first in their folder.
OFFLINE = """
import gc, socket, sys
def refuse(*given, **more):
    raise OSError(f"a connection, while the network is refused: {given}")
socket.getaddrinfo = socket.create_connection = refuse
connect = socket.socket.connect
socket.socket.connect = lambda one, place: connect(one, place) if one.family == socket.AF_UNIX else refuse(place)
from sphinx.builders.html import StandaloneHTMLBuilder as Builder
from sphinx.cmd.build import main
gc.set_threshold(200_000, 20, 100)
Builder.search, navigation, of_folder = False, Builder._get_local_toctree, {}
def shared(builder, name, collapse=True, **options):
    folder = name.rpartition("/")[0]
    if folder.count("/") < 2:
        return navigation(builder, name, collapse, **options)
    key = folder, collapse, *options.items()
    if key not in of_folder:
        of_folder[key] = navigation(builder, name, collapse, **options)
    return of_folder[key]
Builder._get_local_toctree = shared
sys.exit(main(sys.argv[1:]))
"""


def build(*arguments: str | Path, conf: Path = ROOT / "docs") -> subprocess.CompletedProcess[str]:
    """Run sphinx-build with the options that `make docs` passes."""
    (line,) = re.findall(r"^\t\$\(BIN\)/sphinx-build (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = line.partition(" -c docs")[0]
    command = [sys.executable, "-c", OFFLINE, *shlex.split(options), "-c", conf, *arguments]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return run(*command, cwd=ROOT, timeout=270, env=os.environ | path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build("-d", out / "trees", ROOT, out / "html")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out / "html"


class Links(HTMLParser):
    """The ids of a page, the places that it links to, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe") and ("href" in given or "src" in given):
            self.loaded.append(given.get("href") or given["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    """Each is parsed once."""
    return {path: Links(path) for path in sorted(site.rglob("*.html"))}


@cache
def target_of(folder: Path, link: str) -> Path:
    """The file that a link of a page in the folder leads to; most links are on many pages."""
    target = (folder / unquote(link)).resolve()
    assert target.exists(), (folder, link)
    return target


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site: Path, pages: dict[Path, Links]) -> None:
    assert len(pages) > 35
    checked = 0
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = target_of(path.parent, parts.path) if parts.path else path
            checked += 1
            if parts.fragment and target.suffix == ".html":
                anchors = pages[target].ids | {"", "top"}
                assert unquote(parts.fragment) in anchors, (path.relative_to(site), link)
    assert checked > 1000


@pytest.mark.slow
def test_the_links_of_the_sources_lead_to_pages_of_the_site(site: Path, pages: dict[Path, Links]) -> None:
    """Also of the README: those that a code host resolves are not left as text or as a copy of the source."""
    for source in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        page = pages[site / source.relative_to(ROOT).with_suffix(".html")]
        text = re.sub(r"^```.*?^```", "", source.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]+\.md)", text):
            html = f"{target.removesuffix('.md')}.html"
            assert any(link.partition("#")[0] == html for link in page.links), (source.name, target)


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Links]) -> None:
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, (path.relative_to(site), link)


@pytest.mark.slow
def test_every_page_is_in_the_table_of_contents(site: Path, pages: dict[Path, Links]) -> None:
    links = pages[site / "docs/index.html"].links
    contents = {(site / "docs" / link).resolve() for link in links if "#" not in link}
    written = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    listed = [path for path in written if path.parents[1].name != "reference"]  # of a class: its package has it
    wanted = {site / path.relative_to(ROOT).with_suffix(".html") for path in listed}
    assert wanted <= contents | {site / "docs/index.html"}


@pytest.mark.slow
def test_every_public_name_has_an_entry(site: Path) -> None:
    from drivetrain import transforms
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    entries = {name for domain, names in found.items() if domain.startswith("py:") for name in names}
    for package in ("drivetrain", "drivetrain.loaders", "drivetrain.strategies", "drivetrain.pipeline"):
        names = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
        assert names <= entries | {f"{package}.__version__"}, names - entries
    further = ("Transform", "Report", "Session", "get", "to_dict", "catalogue", "from_composer")
    assert {f"drivetrain.transforms.{name}" for name in (*transforms.TRANSFORMS, *further)} <= entries
    methods = ("load", "transform", "optimize", "distribute", "task", "plan", "fit", "ledger", "build")
    assert {f"drivetrain.Pipeline.{name}" for name in methods} <= entries  # some are those of a private base


@pytest.mark.slow
def test_notebooks_are_shown_with_their_outputs(site: Path, pages: dict[Path, Links]) -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shown = pages[site / "notebooks" / f"{path.stem}.html"].loaded
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        outputs = ["image/png" in output.get("data", {}) for cell in cells for output in cell.outputs]
        assert sum("_images/" in link for link in shown) == sum(outputs) > 0


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def test_links_of_the_sources_lead_to_files_and_headings() -> None:
    """What the site's tests find, too, after half a minute."""
    checked = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.exists(), (page.name, link)
            if parts.fragment and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert parts.fragment in anchors, (page.name, link)
            checked += 1
    assert checked > 100


def test_the_reference_describes_every_public_package_and_the_contents_list_every_page() -> None:
    pages = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").glob("*/*.md"),
    ]  # deeper ones are written by the build
    texts = {page: page.read_text() for page in pages}
    told = re.findall(r"^\.\. public-names:: (\S+)$", "\n".join(texts.values()), re.MULTILINE)
    assert sorted(told) == sorted(PACKAGES)
    contents = "\n".join(re.findall(r"^```\{toctree\}.*?^```", "\n".join(texts.values()), re.DOTALL | re.MULTILINE))
    for page in texts:
        assert page.name == "index.md" or page.stem in contents, page.name


def test_mistakes_fail_the_build(tmp_path: Path) -> None:
    """A link to a page, one to a heading, a heading of the wrong level, a page that no table of contents has, a picture
    that is not described."""
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs/index.md").write_text(
        "# A\n\n[a page](nowhere.md)\n\n[a heading](#nothing)\n\n![a](a.svg)\n\n### B\n"
    )
    (source / "docs/a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (source / "docs/alone.md").write_text("# C\n")
    done = build(source, tmp_path / "html")
    assert done.returncode == 1
    for warning in (
        "cross-reference target not found: 'nowhere.md'",
        "cross-reference target not found: 'nothing'",
        "Non-consecutive header level",
        "the picture docs/a.svg needs a description of 4 words or more",
        "alone.md: WARNING: document isn't included in any toctree",
    ):
        assert warning in done.stderr
