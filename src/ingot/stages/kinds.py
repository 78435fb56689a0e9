"""The registry of stage kinds. A new kind is a package beside this file and a line here."""

from ingot.core.settings import Settings
from ingot.stages.corpus.kind import CORPUS
from ingot.stages.evaluation.kind import EVALUATE, FISHER, JUDGE
from ingot.stages.kind import Kind
from ingot.stages.models.kind import IMPORT
from ingot.stages.synthesis.kind import GENERATE, LABEL
from ingot.stages.tokenize.kind import TOKENIZER, TOKENS
from ingot.stages.training.kind import TRAIN

KINDS: dict[str, Kind] = {
    "corpus": CORPUS,
    "tokenizer": TOKENIZER,
    "tokens": TOKENS,
    "train": TRAIN,
    "import": IMPORT,
    "evaluate": EVALUATE,
    "fisher": FISHER,
    "judge": JUDGE,
    "generate": GENERATE,
    "label": LABEL,
}

RECIPE_KINDS: dict[str, type[Settings]] = {name: kind.settings for name, kind in KINDS.items()}
"""Kind -> settings model."""
