"""Add to the mkdocs site the pages outside docs/ and the files that pages link to.

Pages link by paths of the repository, so that the links work where its files are read. This module rewrites them for
the site:

- README and other pages outside docs/ become pages of the site.
- Every other linked file is copied to files/. A folder becomes a page that lists its files.
- A broken link stays, and mkdocs fails the build.

At the end the site is searched for anything that a browser would fetch from other hosts.
"""

# ruff: noqa: INP001  # hooks of mkdocs.yml

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
#: file of the repository -> page of the site
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench.md",
    "bench/context-work.md": "bench/context-work.md",
    "bench/real-input.md": "bench/real-input.md",
}
_DOCS = "docs/"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
#: what a browser fetches by itself: attribute by element
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_HARMLESS = {"canonical", "next", "prev", "alternate"}
_OF_STYLES = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


class Fetched(HTMLParser):
    """The addresses in a page that a browser would fetch from another host."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        given = dict(attrs)
        address = given.get(_FETCHED.get(tag, "")) or ""
        if re.match("(?:https?:)?//", address) and given.get("rel") not in _HARMLESS:
            self.found.append(address)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and the linked files."""
    texts = {name: (_ROOT / name).read_text("utf-8") for name in _PAGES}
    texts |= {_DOCS + file.src_uri: file.content_string for file in files.documentation_pages()}
    for name, target in _PAGES.items():
        files.append(File.generated(config, target, content=relinked(texts[name], name)))
    for name in sorted({found for source, text in texts.items() for found in linked(text, source)}):
        path = _ROOT / name
        if path.is_dir():
            files.append(File.generated(config, site_path(name), content=folder_page(path)))
        elif site_path(name).startswith("files/"):
            files.append(File.generated(config, site_path(name), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of a page in docs/ hold."""
    del config, files
    return markdown if page.file.generated_by else relinked(markdown, _DOCS + page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build if the site fetches anything from other hosts."""
    found = [line for path in Path(config.site_dir).rglob("*") for line in fetched(path)]
    if found:
        raise PluginError("the site would fetch from elsewhere:\n" + "\n".join(found))


def fetched(path: Path) -> Iterator[str]:
    """Return the addresses that a browser would fetch from another host."""
    if path.suffix == ".html":
        found = Fetched(path.read_text("utf-8")).found
    else:
        found = _OF_STYLES.findall(path.read_text("utf-8")) if path.suffix == ".css" else []
    yield from (f"{path.name}: {address}" for address in found)


def linked(text: str, source: str) -> Iterator[str]:
    """Return the files and folders of the repository that a text links to."""
    for part in _FENCE.split(text)[::2]:
        for match in _LINK.finditer(part):
            name = repository_path(match[1], source)
            if (_ROOT / name).exists():
                yield name


def relinked(text: str, source: str) -> str:
    """Return a text of the repository with its links rewritten for the site."""
    here = posixpath.dirname(site_path(source))

    def replace(match: re.Match[str]) -> str:
        name = repository_path(match[1], source)
        if not (_ROOT / name).exists():
            return match[0]
        return posixpath.relpath(site_path(name), here or ".") + (match[2] or "")

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def repository_path(link: str, source: str) -> str:
    """Where a link of a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def site_path(name: str) -> str:
    """Return the path of a repository file or folder in the site."""
    if name in _PAGES:
        return _PAGES[name]
    if name.startswith(_DOCS):
        return name.removeprefix(_DOCS)
    return f"files/{name}/index.md" if (_ROOT / name).is_dir() else f"files/{name}"


def folder_page(folder: Path) -> str:
    """Return a page with the files of a folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    parts = [
        f"## {file.name}\n\n```{file.suffix.removeprefix('.')}\n{file.read_text('utf-8').rstrip()}\n```"
        for file in files
    ]
    parts.insert(0, f"# {folder.relative_to(_ROOT).as_posix()}")
    return "\n\n".join(parts) + "\n"
