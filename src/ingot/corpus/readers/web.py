"""Pages of the web: HTML, and the records of WARC and WET archives (ISO 28500) as crawlers write them.

Text comes from resiliparse: by default the main content without navigation, footers and comments; or, at a fraction of
the speed, that which trafilatura finds. Titles, declared languages and addresses are kept beside it. The packages are
of the extra `corpus`; without them such files are named and quarantined, never read as text with their tags.
"""

import codecs
import functools
import json
import operator
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ingot.corpus.readers.packing import Damaged

Html = Literal["main", "plain", "trafilatura"]
_INSTALL = "pip install 'ingot[corpus]' reads its text"
_TEXT_TYPES = ("text/plain",)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_DECLARED = re.compile(rb"<meta[^>]{0,200}charset", re.IGNORECASE)
_DECLARATION_BYTES = 4096
"""Where a page declares its encoding: browsers read 1,024 bytes, pages do not always keep to it."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_GZIP = b"\x1f\x8b"


class Page(NamedTuple):
    """The text of a page, and what else it says about itself."""

    text: str
    metadata: dict[str, Any]
    """`title`, `language` as declared, `link_fraction` (of its characters, those in links); `url`, `date`."""
    guessed: str = ""
    """The encoding, if it was guessed: none is declared, or not one that fits, and the page is not UTF-8."""


class LostPage(NamedTuple):
    """A page that cannot be read."""

    reason: str
    bytes: int


class Record(NamedTuple):
    """A page of an archive and its place."""

    page: Page | LostPage
    offset: int
    """Byte of the record in the file as it is packed."""


def page_of(data: bytes, html: Html, encoding: str | None = None) -> Page:
    """The page of an HTML file.

    Args:
        data: its bytes.
        html: `main` content, the same as `trafilatura` finds it, or all of its text (`plain`).
        encoding: None: what the page declares, or what its bytes look like.

    Raises:
        Damaged: resiliparse is missing, or the page cannot be parsed.
    """
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
        from resiliparse.parse.html import HTMLTree
    except ImportError:
        raise Damaged(f'is HTML; {_INSTALL}, kind = "text" of the source keeps its tags') from None
    if not encoding and (data.startswith(_MARKS) or _DECLARED.search(data, 0, _DECLARATION_BYTES)):
        encoding = detect_encoding(data, from_html_meta=True)
    fits = next((name for name in (encoding, "utf-8") if name and _is_encoded(data, name)), None)
    guessed = "" if fits else detect_encoding(data) or "cp1252"
    source = bytes_to_str(data, fits or guessed)
    tree = HTMLTree.parse(source)
    main = html == "main"
    if html == "trafilatura":
        text = _by_trafilatura(source)
    else:
        text = extract_plain_text(tree, main_content=main, list_bullets=main, alt_texts=False)
    found: dict[str, Any] = {"title": (tree.title or "").strip()}
    if tree.document is not None and (root := tree.document.query_selector("html")) is not None:
        found["language"] = root.getattr("lang") or ""
    if (body := tree.body) is not None:
        links = sum(len(link.text or "") for link in body.query_selector_all("a"))
        found["link_fraction"] = round(links / max(1, len(body.text or "")), 3)
    return Page(text, {name: value for name, value in found.items() if value != ""}, guessed)


def _is_encoded(data: bytes, encoding: str) -> bool:
    """Whether bytes are text in an encoding."""
    try:
        data.decode(encoding)
    except (LookupError, ValueError):
        return False
    return True


def _by_trafilatura(source: str) -> str:
    """The main content, without comments; "" if there is none."""
    from trafilatura import extract

    try:
        return extract(source, include_comments=False, include_tables=True) or ""
    except Exception as error:  # of any kind, on pages that nobody wrote by hand
        raise Damaged(f"cannot be read by trafilatura ({type(error).__name__}: {error})") from None


def records(path: Path, packing: str | None, html: Html, max_bytes: int, skipped: Counter[str]) -> Iterator[Record]:
    """The pages of an archive: successful responses with HTML or plain text, and extracted texts (WET).

    Args:
        path: the archive.
        packing: how it is packed; gzip, or None.
        html: as `page_of`.
        max_bytes: longest page.
        skipped: counts what is not read, by reason.

    Raises:
        Damaged: fastwarc is missing, or the archive is corrupt from some record on.
    """
    if packing not in (None, "gzip"):
        raise Damaged(f"is a WARC archive packed with {packing}; unpack it, or pack it with gzip")
    try:
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise Damaged(f"is a WARC archive; {_INSTALL}") from None
    response = WarcRecordType.response
    unread = [(name, getattr(WarcRecordType, name)) for name in ("resource", "revisit", "continuation")]
    kinds = functools.reduce(operator.or_, (kind for _, kind in unread), response | WarcRecordType.conversion)
    with path.open("rb") as file:
        try:
            for record in ArchiveIterator(file, record_types=kinds, parse_http=True):
                if kind := next((name for name, kind in unread if record.record_type == kind), ""):
                    skipped[f"records of type {kind}"] += 1
                    continue
                if record.record_type == response and not record.is_http:
                    skipped[f"responses of type {record.headers.get('Content-Type') or 'unknown'}"] += 1
                    continue
                length = record.content_length
                type_ = (record.http_content_type or "").lower() if record.is_http else "text/plain"
                status = getattr(record.http_headers, "status_code", None) if record.is_http else 200
                if status != 200:
                    skipped[f"responses with status {status or 'unknown'}"] += 1
                elif type_ not in (*_TEXT_TYPES, *_HTML_TYPES):
                    skipped[f"responses of type {type_ or 'unknown'}"] += 1
                else:
                    page = _page(record, type_ in _HTML_TYPES, html, length, max_bytes)
                    yield Record(page, record.stream_pos)
        except (OSError, EOFError, ValueError) as error:
            raise Damaged(f"is corrupt ({error})") from None


def _page(record: Any, is_html: bool, html: Html, length: int, max_bytes: int) -> Page | LostPage:
    if length > max_bytes:
        return LostPage(f"the page has {length:,} bytes, more than max_document_mb", length)
    data = record.reader.read()
    if len(data) < length:
        return LostPage(f"the record is cut off after {len(data):,} of {length:,} bytes", len(data))
    place = {
        "url": record.headers.get("WARC-Target-URI") or "",
        "date": record.headers.get("WARC-Date") or "",
    }
    declared = (record.http_charset or None) if record.is_http else "utf-8"
    try:
        data = _decoded(data, record.http_headers, max_bytes) if record.is_http else data
        page = page_of(data, html, declared) if is_html else Page(data.decode(declared or "utf-8"), {})
    except (Damaged, LookupError, ValueError) as error:
        return LostPage(f"the page cannot be read ({error})", len(data))
    return page._replace(metadata={name: value for name, value in place.items() if value} | page.metadata)


def _decoded(data: bytes, headers: Any, max_bytes: int) -> bytes:
    """The body of a response without its codings, which some crawlers store and others only name.

    Raises:
        ValueError: it is not complete, too long, or has a coding that is not read.
    """
    transfer, content = ((headers.get(name) or "").lower() for name in ("Transfer-Encoding", "Content-Encoding"))
    if "chunked" in transfer and _CHUNK_SIZE.match(data):
        data = _unchunked(data)
    for coding in reversed([part.strip() for part in content.split(",")]):
        if coding in ("gzip", "x-gzip") and data.startswith(_GZIP):
            data = _inflated(data, max_bytes, zlib.MAX_WBITS | 16)
        elif coding == "deflate" and not _is_encoded(data, "utf-8"):
            data = _inflated(data, max_bytes, zlib.MAX_WBITS if data[:1] == b"\x78" else -zlib.MAX_WBITS)
        elif coding not in ("", "identity", "gzip", "x-gzip", "deflate") and not _is_encoded(data, "utf-8"):
            raise ValueError(f"its Content-Encoding is {coding}, expected gzip or deflate")
    return data


def _unchunked(data: bytes) -> bytes:
    """The content of the chunks of a body (RFC 9112, 7.1)."""
    parts, at = [], 0
    while match := _CHUNK_SIZE.match(data, at):
        size, at = int(match[1], 16), match.end()
        if size == 0:
            return b"".join(parts)
        parts.append(data[at : at + size])
        at += size
        at += 2 if data[at : at + 2] == b"\r\n" else 1
    raise ValueError("its last chunk is missing")


def _inflated(data: bytes, max_bytes: int, window: int) -> bytes:
    inflate = zlib.decompressobj(window)
    try:
        out = inflate.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(out) > max_bytes:
        raise ValueError("more bytes than max_document_mb")
    if not inflate.eof:
        raise ValueError("its packed content is cut off")
    return out


def metadata_json(page: Page) -> str | None:
    """What is kept beside the text, as a JSON object."""
    return json.dumps(page.metadata, ensure_ascii=False, sort_keys=True) if page.metadata else None
