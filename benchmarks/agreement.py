"""`python -m benchmarks.agreement`: is what the corpus factory decides right? Speed is in `benchmarks.factory`.

    near-duplicates CORPUS        recall of planted copies by exact similarity, and precision
    rules CORPUS --peer PYTHON    decisions of the published rules and of datatrove's filters on 2,000 documents
    languages HELP                languages of samples of 200 characters

CORPUS is a directory of `benchmarks.documentation`, PYTHON an interpreter with datatrove[processing] 0.10, and HELP the
folder `usr/share/help` of Debian's package gnome-user-docs, unpacked with `dpkg -x`.
"""

import argparse
import gzip
import html
import json
import random
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.contenders import SCRIPTS
from ingot.corpus import minhash
from ingot.corpus.languages import identify
from ingot.corpus.published_rules import RULE_SETS, RuleSets
from ingot.corpus.settings import MinHashSettings

DOCUMENTS, REMOVALS, COMPARED = 2000, 300, 100
"""Documents that rules decide on; dropped documents that precision is measured on; members of a cluster that each of
these is compared with."""
SAMPLE, SAMPLES, LEAST = 200, 200, 100
"""Characters of a sample; most samples of a language; a language with fewer than the least is left out."""
SIMILAR = 0.5
SAME = ({"no", "nb", "nn"}, {"sr", "hr", "bs", "sh"}, {"id", "ms"})
"""Languages that count as one."""


def runs(text: str) -> set[tuple[str, ...]]:
    """The runs of five words of a text, by a regular expression."""
    words = re.findall(r"[a-z0-9\u0080-\U0010ffff]+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(a: str, b: str) -> float:
    """Exact Jaccard similarity."""
    return len(runs(a) & runs(b)) / max(1, len(runs(a) | runs(b)))


def read(corpus: Path) -> tuple[list[str], list[str]]:
    """Ids and texts of a corpus."""
    contents = [gzip.decompress(file.read_bytes()) for file in sorted(corpus.glob("*.jsonl.gz"))]
    rows = [json.loads(line) for content in contents for line in content.splitlines()]
    return [row["id"] for row in rows], [row["text"] for row in rows]


def near_duplicates(corpus: Path) -> None:
    """Print the recall of planted copies for each tenth of similarity, and the precision of sampled removals."""
    ids, texts = read(corpus)
    settings = MinHashSettings()
    batches = [texts[i : i + 1024] for i in range(0, len(texts), 1024)]
    signatures = [minhash.signatures(pl.Series(batch), settings.bands * settings.rows) for batch in batches]
    kept_for = minhash.find(np.concatenate(signatures), np.zeros(len(texts)), settings).kept_for
    number = {name: i for i, name in enumerate(ids)}
    found = defaultdict[int, list[bool]](list)
    for line in (corpus / "truth.jsonl").read_text().splitlines():
        pair = json.loads(line)
        a, b = number[pair["original"]], number[pair["copy"]]
        found[min(9, int(10 * similarity(texts[a], texts[b])))].append(bool(kept_for[a] == kept_for[b]))
    for tenth, hits in sorted(found.items()):
        print(f"similarity from {tenth / 10}: {sum(hits)} of {len(hits)} planted copies found")
    clusters = defaultdict[int, list[int]](list)
    for document, kept in enumerate(kept_for.tolist()):
        clusters[kept].append(document)
    dropped = np.flatnonzero(kept_for != np.arange(len(texts))).tolist()
    chosen = random.Random(0).sample(dropped, min(REMOVALS, len(dropped)))
    right = 0
    for document in chosen:
        others = [other for other in clusters[kept_for[document]][:COMPARED] if other != document]
        right += any(similarity(texts[document], texts[other]) >= SIMILAR for other in others)
    print(f"precision: {right} of {len(chosen)} removals resemble one of their cluster by {SIMILAR} or more")


def rules(corpus: Path, peer: str) -> None:
    """Print on how many documents each set of rules decides as datatrove's filter does, and the differences."""
    ids, texts = read(corpus)
    originals = [text for name, text in zip(ids, texts, strict=True) if not name.endswith("#copy")]
    texts = originals[:: max(1, len(originals) // DOCUMENTS)][:DOCUMENTS]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    command = [peer, str(SCRIPTS / "datatrove_decisions.py")]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    theirs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    documents = pl.DataFrame({"text": texts, "path": ["a.txt"] * len(texts), "language": ["en"] * len(texts)})
    for name, rule_set in RULE_SETS.items():
        sets = RuleSets([rule_set])
        measures = sets.measures(documents)
        broken = {reason: rule.broken(measures[rule.measure]) for reason, rule in sets.rules.items()}
        ours = np.any([*broken.values()], axis=0)
        same = [bool(own) == bool(other[name]) for own, other in zip(ours, theirs, strict=True)]
        print(
            f"{name}: {sum(same)} of {len(same)} decisions agree; datatrove drops {sum(bool(t[name]) for t in theirs)}"
        )
        differences = Counter[str]()
        for row in np.flatnonzero(~np.array(same)).tolist():
            reasons = [reason for reason, mask in broken.items() if mask[row]]
            differences[f"ours {reasons or 'keeps'}, datatrove {theirs[row][name] or 'keeps'}"] += 1
        for difference, times in differences.most_common():
            print(f"    {times} x {difference}")


def languages(folder: Path) -> None:
    """Print the fraction of samples whose language is right: the mean over languages, and the worst ones."""
    draw, right = random.Random(0), {}
    english = set(paragraphs(folder / "C"))
    for directory in sorted(folder.iterdir()):
        own = [text for text in paragraphs(directory) if directory.name == "C" or text not in english]
        draw.shuffle(own)
        text = " ".join(own)
        samples = [text[i : i + SAMPLE] for i in range(0, len(text) - SAMPLE, SAMPLE)][:SAMPLES]
        if len(samples) < LEAST:
            continue
        name = "en" if directory.name == "C" else re.split("[_@]", directory.name)[0]
        same = next((group for group in SAME if name in group), {name})
        right[directory.name] = float(np.mean([code in same for code in identify(pl.Series(samples))["language"]]))
    worst = ", ".join(f"{name} {fraction:.3f}" for name, fraction in sorted(right.items(), key=lambda x: x[1])[:5])
    print(f"{len(right)} languages: {np.mean([*right.values()]):.4f} of samples right; worst: {worst}")


def paragraphs(directory: Path) -> list[str]:
    """The paragraphs of GNOME's help in a language, without markup."""
    out = []
    for page in sorted(directory.glob("gnome-help/*.page")):
        text = re.sub(r"(?s)<info>.*?</info>", " ", page.read_text("utf-8"))
        texts = [html.unescape(re.sub(r"<[^>]*>", "", found)) for found in re.findall(r"(?s)<p>(.*?)</p>", text)]
        out += [" ".join(each.split()) for each in texts if each.strip()]
    return out


def main() -> None:
    """Run one of the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("near-duplicates", "rules", "languages"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer")
    options = parser.parse_args()
    if options.check == "near-duplicates":
        near_duplicates(options.directory)
    elif options.check == "languages":
        languages(options.directory)
    elif options.peer:
        rules(options.directory, options.peer)
    else:
        parser.error("rules: found no --peer, expected the interpreter with datatrove")


if __name__ == "__main__":
    main()
