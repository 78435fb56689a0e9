"""datatrove's decision on each document by each of its quality filters; texts and decisions are lines of JSON."""

import json
import sys

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

FILTERS = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}


def main():
    """Print {filter: reason, or "" to keep} for each text."""
    filters = {name: make() for name, make in FILTERS.items()}
    for number, line in enumerate(sys.stdin):
        text = json.loads(line)
        results = {name: one.filter(Document(text=text, id=str(number))) for name, one in filters.items()}
        print(json.dumps({name: "" if result is True else result[1] for name, result in results.items()}))


if __name__ == "__main__":
    main()
