"""Do the sources of a stage kind still give the result that its version promises?

`kind_sources.json` records, for each kind, the version and a digest of the code that determines its result (syntax
trees without comments and docstrings, and C++ without comments). When code changes, either the version in
`stages/kinds.py` is raised, so that old results are made anew, or somebody states that the result is the same:

    python -m tests.kind_sources                             # after raising a version
    python -m tests.kind_sources --same-result "what changed and why nothing else does"
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import ingot
from ingot.core.artifact import digest_json
from ingot.stages.kinds import KINDS

RECORD = Path(__file__).with_suffix(".json")
ROOT = Path(ingot.__file__).parent
PYTHON = ".".join(map(str, sys.version_info[:2]))


def digest(sources: tuple[str, ...]) -> str:
    """Digest of the syntax of all modules below the given packages and files."""
    files = [f for s in sources for f in ([ROOT / s] if s.endswith(".py") else sorted((ROOT / s).rglob("*")))]
    return digest_json({str(f.relative_to(ROOT)): _READ[f.suffix](f.read_text()) for f in files if f.suffix in _READ})


def _syntax(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _without_comments(source: str) -> str:
    return re.sub(r"\s*//.*", "", source)


_READ = {".py": _syntax, ".cpp": _without_comments, ".h": _without_comments}


def problems() -> list[str]:
    """Kinds whose code differs from the record."""
    known = json.loads(RECORD.read_text())
    found = []
    for name, kind in KINDS.items():
        record = known.get(name, {"version": None, "digest": None})
        if record["digest"] != digest(kind.sources):
            found.append(
                f"the code of kind '{name}' (version {kind.version}) changed since it was recorded: raise its version "
                'in stages/kinds.py and run `python -m tests.kind_sources`, or run it with --same-result "why"'
            )
    return found


def record(same_result: str | None) -> None:
    """Write the record anew; a changed digest needs a raised version or a reason."""
    known: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name, kind in KINDS.items():
        old, now = known.get(name), digest(kind.sources)
        if old and old["digest"] != now and old["version"] == kind.version and not same_result:
            raise SystemExit(
                f"kind '{name}' changed but its version is still {kind.version}; raise it or say --same-result"
            )
        notes = old["same_result"] if old and old["version"] == kind.version else []
        if old and old["digest"] != now and old["version"] == kind.version:
            notes = [*notes, same_result]
        known[name] = {"version": kind.version, "digest": now, "same_result": notes}
    known["python"] = PYTHON  # syntax trees differ between versions of the language
    RECORD.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--same-result", metavar="WHY")
    record(parser.parse_args().same_result)
