"""`python -m benchmarks.documentation DIR`: 150 MB of real text with planted near-copies, from packages of Debian.

Documentation in many languages, sources and manual pages, downloaded with `apt-get download` and not installed. One
document in twenty is planted again with 0, 1, 5, 15 or 30 % of its words replaced, left out or added. `truth.jsonl`
has the pairs; the documents are in 16 files `*.jsonl.gz`.
"""

import argparse
import gzip
import html
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

PACKAGES = ("debian-handbook", "git-doc", "perl-doc", "postgresql-doc-15", "rust-doc", "linux-doc-6.1")
FILES, EDIT_RATES = 16, (0.0, 0.01, 0.05, 0.15, 0.3)
_SHARE = {"rust-doc": 0.12}
"""Fraction of the files of a package that are taken; all of the others."""
_HIDDEN = re.compile(r"(?s)<(script|style|nav|head)\b.*?</\1>|<!--.*?-->")
_TAG = re.compile(r"<[^>]*>")
_LEAST_WORDS = 100


def documents(packages: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(name, text) of each file of the packages and of Python's installed sources."""
    with tempfile.TemporaryDirectory() as name:
        for package in PACKAGES:
            (archive,) = packages.glob(f"{package}_*.deb")
            root = Path(name) / package
            subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
            for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
                if draw.random() < _SHARE.get(package, 1.0) and (text := _text(path)):
                    yield f"{package}/{path.relative_to(root)}", text
    for path in sorted(Path(sys.prefix).rglob("*.py")):
        if text := _text(path):
            yield f"python/{path.relative_to(sys.prefix)}", text


def _text(path: Path) -> str:
    suffixes = path.suffixes[-2:]
    if not suffixes or suffixes[-1] not in (".html", ".txt", ".pod", ".rst", ".gz", ".py"):
        return ""
    data = gzip.decompress(path.read_bytes()) if suffixes[-1] == ".gz" else path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ""
    if ".html" in suffixes:
        text = html.unescape(_TAG.sub("", _HIDDEN.sub(" ", text)))
        text = re.sub(r"\n\s*\n+", "\n\n", text)
    return text if len(text) < 1_000_000 and len(text.split()) >= 20 else ""


def edited(text: str, rate: float, vocabulary: list[str], draw: random.Random) -> str:
    """The text with a fraction of its words replaced, left out or preceded by another word."""
    pieces = re.split(r"(\s+)", text)
    for i in range(0, len(pieces), 2):
        if pieces[i] and draw.random() < rate:
            word = draw.choice(vocabulary)
            pieces[i] = draw.choice((word, "", f"{word} {pieces[i]}"))
    return "".join(pieces)


def write(directory: Path, packages: Path, megabytes: float) -> None:
    """Write the documents and the truth about the planted copies."""
    draw = random.Random(1)
    texts = list(documents(packages, draw))
    draw.shuffle(texts)
    total, kept = 0, []
    for name, text in texts:
        if total < megabytes * 1e6:
            kept.append((name, text))
            total += len(text.encode())
    vocabulary = [word for _, text in draw.sample(kept, 200) for word in text.split()[:100]]
    rows = [{"id": name, "text": text} for name, text in kept]
    truth = []
    for number, (name, text) in enumerate(kept[::20]):
        rate = EDIT_RATES[number % len(EDIT_RATES)]
        if len(text.split()) >= _LEAST_WORDS:
            truth.append({"original": name, "copy": f"{name}#copy", "rate": rate})
            rows.append({"id": f"{name}#copy", "text": edited(text, rate, vocabulary, draw)})
    draw.shuffle(rows)
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        files = [stack.enter_context(gzip.open(directory / f"{i:02}.jsonl.gz", "wt")) for i in range(FILES)]
        for number, row in enumerate(rows):
            files[number % FILES].write(json.dumps(row, ensure_ascii=False) + "\n")
    (directory / "truth.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in truth))
    print(f"{len(rows):,} documents, {total / 1e6:.0f} MB, {len(truth):,} planted copies")


def main() -> None:
    """Download what is missing, and write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--packages", type=Path, default=Path("~/.cache/ingot/packages").expanduser())
    parser.add_argument("--megabytes", type=float, default=150)
    options = parser.parse_args()
    options.packages.mkdir(parents=True, exist_ok=True)
    missing = [name for name in PACKAGES if not list(options.packages.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=options.packages, check=True)
    write(options.directory, options.packages, options.megabytes)


if __name__ == "__main__":
    main()
