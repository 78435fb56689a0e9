"""The registry of stage kinds. A new kind is a package beside this file and a line here."""

from ingot.core.settings import Settings
from ingot.stages.corpus.kind import CORPUS
from ingot.stages.evaluation.kind import EVALUATE, FISHER, JUDGE
from ingot.stages.kind import Kind
from ingot.stages.models.kind import IMPORT
from ingot.stages.selection.kind import SCORE, SCORER, SELECT
from ingot.stages.synthesis.kind import GENERATE, LABEL
from ingot.stages.tokenize.kind import TOKEN_FILES, TOKENIZER, TOKENS
from ingot.stages.training.kind import ANNOTATE, TRAIN

KINDS: dict[str, Kind] = {
    "corpus": CORPUS,
    "tokenizer": TOKENIZER,
    "tokens": TOKENS,
    "token-files": TOKEN_FILES,
    "train": TRAIN,
    "annotate": ANNOTATE,
    "import": IMPORT,
    "evaluate": EVALUATE,
    "fisher": FISHER,
    "judge": JUDGE,
    "generate": GENERATE,
    "label": LABEL,
    "scorer": SCORER,
    "score": SCORE,
    "select": SELECT,
}

RECIPE_KINDS: dict[str, type[Settings]] = {name: kind.settings for name, kind in KINDS.items()}
"""Kind -> settings model."""
