"""Chains of stages, each started from the one before, as their directories tell, and what the last one forgot."""

from collections.abc import Mapping
from typing import Any

from ingot.evaluate.forgetting import Link, Scores, summary
from ingot.evaluate.likelihood import divergence
from ingot.stages.evaluation.settings import EvaluateStageSettings
from ingot.stages.job import Input, Job, corpus_of, open_stage
from ingot.stages.models.lineage import ancestry
from ingot.stages.models.load import load_model, measured_context
from ingot.stages.training.settings import TrainSettings
from ingot.store.reader import Store
from ingot.train.settings import rows_per_pass


def chains(models: Mapping[str, Input]) -> list[list[Link]]:
    """A chain for each of the models that was trained from another of them (perhaps by way of stages that are not
    among them), and from which none of them was trained; first stage first.
    """
    named = {stage.key: name for name, stage in models.items()}
    found = [_links(stage, named) for stage in models.values()]
    inner = {link.name for chain in found for link in chain[:-1]}
    return [chain for chain in found if len(chain) > 1 and chain[-1].name not in inner]


def _links(stage: Input, named: Mapping[str, str]) -> list[Link]:
    """From the first of the named stages to this one."""
    links, known, new = [], set[str](), dict[str, None]()
    for record in reversed([open_stage(path) for path in ancestry(stage.path)]):
        if record["kind"] == "train":
            new |= dict.fromkeys(TrainSettings.model_validate(record["settings"]).corpora)
        if record["key"] in named:
            links.append(Link(named[record["key"]], tuple(c for c in new if c not in known)))
            known, new = known | set(new), {}
    return links


def forgotten(
    job: Job, settings: EvaluateStageSettings, scores: Mapping[tuple[str, str], Scores]
) -> list[dict[str, Any]]:
    """Table rows about the last stage of every chain: forgetting, transfer, and how far predictions moved on old text.

    The chains themselves are logged, for the report.
    """
    models, rows = job.roles("model"), []
    for chain in chains(models):
        rows += summary(chain, scores)
        job.log.write("chain", stages=[{"name": link.name, "learned": list(link.learned)} for link in chain])
        for link in chain[:-1]:
            for corpus in link.learned:
                if (link.name, corpus) in scores and (chain[-1].name, corpus) in scores:
                    rows.append(_moved(job, settings, link.name, chain[-1].name, corpus))
    return rows


def _moved(job: Job, settings: EvaluateStageSettings, old: str, new: str, corpus: str) -> dict[str, Any]:
    """KL(old || new) on the held-out text that the old stage was the first to learn."""
    models = job.roles("model")
    before, after = (load_model(models[n].path, job.display.say, settings.device, exact=True) for n in (old, new))
    read = (t for t in job.roles("data").values() if t.key_of("tokenizer") == models[new].key_of("tokenizer"))
    tokens = next(t for t in read if corpus_of(t.name) == corpus)
    store = Store.open(tokens.path / "val", tokenizer=after.tokenizer.fingerprint)
    context = min(measured_context(settings.context, model.config) for model in (before, after))
    rows = rows_per_pass(context)
    with job.display.bar(f"KL of {new} from {old} on {corpus}", unit="rows") as bar:
        kl = divergence(before.model, after.model, store, settings.overlap, rows, bar.advance, context)
    return {"model": new, "task": corpus, "metric": "kl_from_before_nats", **kl}
