"""The kinds that score and select documents: `scorer`, `score` and `select`."""

from typing import Any

from ingot.core.errors import nearest
from ingot.corpus.settings import CorpusSettings
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.kind import LOADING_SOURCES, MODEL_SOURCES
from ingot.stages.selection.settings import ScorerSettings, ScoreSettings, SelectSettings
from ingot.stages.training.kind import check_format, check_held_out

_SCORES = ("corpus/scores", "corpus/pieces.py", "corpus/minhash.py", "corpus/documents.py")


def _scorer_reads(settings: ScorerSettings, resolve: Resolve) -> dict[str, Node]:
    inputs = {}
    for side in ("good", "bad"):
        for name in getattr(settings, side):
            inputs[f"{side}:{name}"] = resolve.stage(name, side, "documents")
        check_held_out(getattr(settings, side), side, "a scorer is measured on", resolve)
    return inputs


def _scorer_facts(settings: ScorerSettings) -> dict[str, Any]:
    sides = {"good": settings.good} | ({"bad": settings.bad} if settings.bad else {})
    return {"type": settings.type, **sides} | ({"measure": settings.measure} if settings.type == "ngram" else {})


SCORER = Kind(
    ScorerSettings,
    1,
    "ingot.stages.selection.scorer:run",
    (*_SCORES, "stages/selection/scorer.py"),
    makes="scorer",
    reads=_scorer_reads,
    facts=_scorer_facts,
)


def _score_reads(settings: ScoreSettings, resolve: Resolve) -> dict[str, Node]:
    inputs = {"data": resolve.stage(settings.data, "data", "documents")}
    if twice := [name for name in (*settings.by, *settings.measures) if name in _scores_of(settings.data, resolve)]:
        resolve.refuse("by", f"'{settings.data}' has the score '{twice[0]}' already; leave it out")
    for name in settings.by:
        node = resolve.stage(name, "by", "scorer", "model")
        if node.kind == "scorer":
            inputs[f"scorer:{name}"] = node
        else:
            check_format(settings.data, ("text",), "data", "a model scores documents of format", resolve)
            inputs[f"model:{name}"] = node
            inputs[f"tokens:{name}"] = resolve.tokens(settings.data, node.inputs["tokenizer"], "by")
    if own := [name for name in settings.similar_to if name in _stages_of(settings.data, resolve)]:
        resolve.refuse(
            "similar_to",
            f"found '{own[0]}', which has the documents of data themselves, so each would have the similarity 1; leave "
            "it out, as documents are compared with those before them in data in any case",
        )
    return inputs | {f"similar:{n}": resolve.stage(n, "similar_to", "documents") for n in settings.similar_to}


def _stages_of(name: str, resolve: Resolve) -> list[str]:
    """The stage that makes some documents, those that scored and selected them before, and their corpus."""
    names, settings = [name], resolve.settings_of(name)
    while isinstance(settings, ScoreSettings | SelectSettings):
        names.append(settings.data)
        settings = resolve.settings_of(settings.data)
    return names


def _scores_of(name: str, resolve: Resolve) -> list[str]:
    """The scores that the documents of a stage have."""
    stages = map(resolve.settings_of, _stages_of(name, resolve))
    return [score for s in stages if isinstance(s, ScoreSettings) for score in (*s.by, *s.measures)]


def _corpus_of(name: str, resolve: Resolve) -> Any:
    """The settings of the stage that the documents of a stage come from."""
    return resolve.settings_of(_stages_of(name, resolve)[-1])


def _phases_of(name: str, resolve: Resolve) -> list[str]:
    """The phases that the documents of a stage may have."""
    for settings in map(resolve.settings_of, _stages_of(name, resolve)):
        if isinstance(settings, SelectSettings) and (settings.phases or settings.phase):
            return [phase.name for phase in settings.phases] or [settings.phase or ""]
    return []


SCORE = Kind(
    ScoreSettings,
    1,
    "ingot.stages.selection.score:run",
    (*MODEL_SOURCES, *_SCORES, *LOADING_SOURCES, "data", "evaluate/likelihood.py", "stages/selection/score.py"),
    makes="documents",
    reads=_score_reads,
    facts=lambda settings: {"data": settings.data, "by": [*settings.by, *settings.measures]},
)


def _select_reads(settings: SelectSettings, resolve: Resolve) -> dict[str, Node]:
    inputs = {"data": resolve.stage(settings.data, "data", "documents")}
    scores, phases = _scores_of(settings.data, resolve), _phases_of(settings.data, resolve)
    rules = {"where": settings.where} | {f"phases ({p.name})": p.where for p in settings.phases}
    if any(bounds.per for where in rules.values() for bounds in where.values()):
        corpus = _corpus_of(settings.data, resolve)
        if not isinstance(corpus, CorpusSettings) or not corpus.languages:
            resolve.refuse("where", "found per = 'language' for a corpus that tells none apart; set its languages")
    sort = {"sort": [settings.sort.by]} if settings.sort else {}
    for setting, names in (rules | sort).items():
        for name in names:
            if name not in scores:
                known = nearest(name, scores) if scores else "score it first, with a stage of kind score"
                resolve.refuse(setting, f"'{settings.data}' has no score '{name}'; {known}")
    if settings.phase and settings.phase not in phases:
        known = nearest(settings.phase, phases) if phases else "define some with `phases` of a stage before this one"
        resolve.refuse("phase", f"'{settings.data}' has no phase '{settings.phase}'; {known}")
    return inputs


def _select_facts(settings: SelectSettings) -> dict[str, Any]:
    where = {name: bounds.model_dump(exclude_none=True) for name, bounds in settings.where.items()}
    names = [phase.name for phase in settings.phases]
    sort = settings.sort and settings.sort.model_dump()
    facts = {"where": where, "phases": names, "phase": settings.phase, "sort": sort}
    return {"data": settings.data} | {name: value for name, value in facts.items() if value}


SELECT = Kind(
    SelectSettings,
    1,
    "ingot.stages.selection.select:run",
    (*_SCORES, "stages/selection/select.py"),
    makes="documents",
    reads=_select_reads,
    facts=_select_facts,
    panel="ingot.report.html.panels_selection:select",
)
