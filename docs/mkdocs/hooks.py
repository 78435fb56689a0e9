"""Links of the documents to files and folders of the repository: on the site each becomes a page with their content."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp"}


def _linked_source(page: str, link: str) -> Path | None:
    """The file outside of docs/, or the folder, that a page links to; None: the link is one within the site."""
    target = (DOCS / page).parent.joinpath(link).resolve()
    inside = target.is_relative_to(DOCS) and not target.is_dir()
    return None if inside or not target.exists() else target.relative_to(ROOT)


def _source_page(source: Path) -> str:
    return f"source/{source}.md"


def _content(source: Path) -> str:
    path = ROOT / source
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir())
        return f"# {source}/\n\n" + "".join(f"- {name}\n" for name in names)
    return f"# {source}\n\n````{LANGUAGES.get(path.suffix, '')}\n{path.read_text()}\n````\n"


def on_files(files: Files, config):
    """Add a page for each source that some page links to."""
    pages = [file for file in files if file.is_documentation_page()]
    links = ((page.src_uri, link) for page in pages for _, link in LINK.findall(page.content_string))
    for source in sorted({s for page, link in links if (s := _linked_source(page, link))}):
        files.append(File.generated(config, _source_page(source), content=_content(source)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Point the links at these pages, and let search find the log, its archive and sources last."""
    here = page.file.src_uri
    if here.startswith(("archive/", "source/", "LOG")):
        page.meta["search"] = {"boost": 0.1}

    def replaced(match: re.Match) -> str:
        source = _linked_source(here, match[2])
        return (
            match[0] if source is None else match[1] + posixpath.relpath(_source_page(source), posixpath.dirname(here))
        )

    return markdown if here.startswith("source/") else LINK.sub(replaced, markdown)
