"""Forgetting over chains of stages, each of which was started from the one before."""

from collections.abc import Mapping
from typing import Any

from ingot.evaluate.forgetting import ChainStage, Scores, summary
from ingot.evaluate.likelihood import comparison, row_count
from ingot.stages.evaluation.settings import EvaluateStageSettings
from ingot.stages.job import Input, Job, corpus_of, read_record
from ingot.stages.models.lineage import lineage
from ingot.stages.models.load import evaluation_context, load_model
from ingot.stages.training.settings import TrainSettings
from ingot.store.reader import Store
from ingot.train.settings import rows_per_pass

MAX_KL_ROWS = 256
"""Most rows on which a KL divergence is measured: both models read them, and few rows give a mean over many tokens."""


def chains(models: Mapping[str, Input]) -> list[list[ChainStage]]:
    """The chains among evaluated models, first stage first.

    A chain ends in a model from which no other evaluated model was trained. Stages between two evaluated models need
    not be evaluated themselves.
    """
    names = {stage.key: name for name, stage in models.items()}
    all_chains = [_chain(stage, names) for stage in models.values()]
    inner = {link.name for chain in all_chains for link in chain[:-1]}
    return [chain for chain in all_chains if len(chain) > 1 and chain[-1].name not in inner]


def _chain(stage: Input, names: Mapping[str, str]) -> list[ChainStage]:
    """The evaluated models in the lineage of a stage, which is the last one.

    Args:
        stage: an evaluated model.
        names: key -> name of each evaluated model.
    """
    links, known, new = [], set[str](), dict[str, None]()
    for record in reversed([read_record(path) for path in lineage(stage.path)]):
        if record["kind"] == "train":
            new |= dict.fromkeys(TrainSettings.model_validate(record["settings"]).corpora)
        if record["key"] in names:
            links.append(ChainStage(names[record["key"]], tuple(c for c in new if c not in known)))
            known, new = known | set(new), {}
    return links


def forgetting_rows(
    job: Job, settings: EvaluateStageSettings, scores: Mapping[tuple[str, str], Scores]
) -> list[dict[str, Any]]:
    """Table rows of the last stage of every chain: forgetting, transfer, and KL divergence on old text.

    The chains are also logged, for the report.
    """
    models, rows = job.roles("model"), []
    for chain in chains(models):
        rows += summary(chain, scores)
        job.log.write("chain", stages=[{"name": link.name, "learned": list(link.learned)} for link in chain])
        for link in chain[:-1]:
            for corpus in link.learned:
                if (link.name, corpus) in scores and (chain[-1].name, corpus) in scores:
                    rows.append(_divergence(job, settings, link.name, chain[-1].name, corpus))
    return rows


def _divergence(job: Job, settings: EvaluateStageSettings, old: str, new: str, corpus: str) -> dict[str, Any]:
    """Table row of KL(old || new) on the held-out split of a corpus that the old stage was trained on."""
    models = job.roles("model")
    before, after = (load_model(models[n].path, job.display.notify, settings.device, exact=True) for n in (old, new))
    encoded = (t for t in job.roles("data").values() if t.key_of("tokenizer") == models[new].key_of("tokenizer"))
    tokens = next(t for t in encoded if corpus_of(t.name) == corpus)
    store = Store.open(tokens.path / "val", tokenizer=after.tokenizer.fingerprint)
    context = min(evaluation_context(settings.context, model.config) for model in (before, after))
    size, rows = rows_per_pass(context), min(MAX_KL_ROWS, row_count(store, settings.overlap, context))
    with job.display.bar(f"KL of {new} from {old} on {corpus}", rows, "rows") as bar:
        kl = comparison(before.model, after.model, store, settings.overlap, size, bar.advance, context, rows).kl
    return {"model": new, "task": corpus, "metric": "kl_from_before_nats", **kl}
