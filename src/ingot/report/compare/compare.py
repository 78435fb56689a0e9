"""Compare runs: their final metrics, the settings that differ, and whether differences exceed chance.

Train stages that differ only in seeds, their own or those of their inputs, form a group with a mean, a 95 % t-interval
and n. Two groups are also compared at equal seeds: the effects that a seed has on both (order of the data, initial
weights) cancel in the paired difference, so its interval is the most sensitive test.

A stage that has not finished is shown with the metrics of its last evaluation and a warning, and is in no mean.

Imported models that an evaluate stage has measured stand beside the stages that began as them: before and after.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ingot.core.artifact import digest_json
from ingot.core.errors import UserError, nearest
from ingot.core.events import METRICS, read_events
from ingot.core.statistics import Interval, mean_interval, paired_difference
from ingot.core.sweep import SEED, SWEEP, short_names, value_label
from ingot.report import reading
from ingot.report.stage_paths import root_of, run_and_name, stages_at
from ingot.stages.job import corpus_of, in_role

LOSS, BITS = "val_loss_nats", "bits_per_byte"
LIKELIHOODS = {"lm", "distill", "gkd"}
"""Objectives whose held-out loss is the same number, -ln p of the labels."""


class Entry:
    """One train stage, finished or not, or an imported model."""

    def __init__(self, path: Path):
        self.path = path
        self.run, self.name = run_and_name(path)
        self.stage = self.name.rpartition("/")[2]
        self.record = reading.record(path)
        self.result, self.facts = reading.result(path), reading.facts(path)
        self.steps, self.evaluations = reading.events(path, "step"), reading.evaluations(path)
        self.lineage = dict(_lineage(self.record, root_of(path)))
        self.label = f"{self.run}/{self.name}"

    @property
    def trained(self) -> bool:
        """Whether training made it; an imported model has no steps and no losses but those of evaluate stages."""
        return self.record["kind"] == "train"

    @property
    def finished(self) -> bool:
        return bool(self.result) or not self.trained

    @cached_property
    def failure(self) -> str:
        """The error with which training failed; empty if it did not."""
        last = read_events(self.path / METRICS)[-1:]
        return last[0]["why"] if last and last[0]["event"] == "failed" else ""

    @property
    def step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Final metrics by name, and those of evaluate stages as `TASK/METRIC`.

        For an unfinished stage, the metrics of its last evaluation and its best loss so far.
        """
        from_evaluate = {name: row["value"] for name, row in self.evaluated.items()}
        if self.finished:
            return {k: float(v) for k, v in self.result.items() if isinstance(v, int | float)} | from_evaluate
        losses = [e[LOSS] for e in self.evaluations if LOSS in e]
        last = {k: v for k, v in (self.evaluations[-1] if self.evaluations else {}).items() if k != "step"}
        known = {"parameters": self.facts.get("parameters"), f"best_{LOSS}": min(losses, default=None)}
        newest = self.steps[-1] if self.steps else {}
        known |= {"tokens": newest.get("tokens_seen"), "tok_s": newest.get("tok_s")}
        return last | {k: v for k, v in known.items() if v is not None} | from_evaluate

    @cached_property
    def evaluated(self) -> dict[str, dict[str, Any]]:
        """Results for this model from evaluate stages of the same run: `TASK/METRIC` -> {value, low, high, n}."""
        rows = {}
        for other in sorted(p for p in self.path.parent.glob("*") if p.is_symlink()):
            inputs = reading.record(other).get("inputs", {})
            names = {name for name, i in in_role(inputs, "model").items() if i["key"] == self.key}
            rows |= {f"{r['task']}/{r['metric']}": r for r in reading.table(other) if r["model"] in names}
        return rows

    @property
    def key(self) -> str:
        return self.record["key"]

    @cached_property
    def group(self) -> str:
        """A digest that is equal for stages that differ only in seeds."""
        return digest_json({name: _without_seed(r) for name, r in self.lineage.items()})

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The distinct seeds that the result depends on; this stage's own is first."""
        return tuple(dict.fromkeys(r["seed"] for r in self.lineage.values() if r["seed"] is not None))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings that the result depends on: `optim.lr` of this stage, `bpe.vocab` of an input `bpe`."""
        out: dict[str, Any] = {}
        for name, record in self.lineage.items():
            prefix = f"{name}." if name else ""
            if "@" not in name:  # a derived tokens stage has no settings of its own
                out |= {prefix + k: v for k, v in _flat(record["canonical"]).items() if k != "seed"}
            out[f"{prefix}code version"], out[f"{prefix}source files"] = record["version"], record["raw"]
        return out

    @cached_property
    def tokenizer(self) -> str:
        """Key of the tokenizer; losses in nats per token are comparable only if it is equal."""
        return next((r["key"] for r in self.lineage.values() if r["kind"] == "tokenizer"), "")

    @cached_property
    def corpora(self) -> frozenset[str]:
        """Keys of the corpora in `data`; losses are comparable only if they are equal."""
        data = {corpus_of(i["name"]) for role, i in self.record["inputs"].items() if role.startswith("data:")}
        return frozenset(r["key"] for name, r in self.lineage.items() if r["kind"] == "corpus" and name in data)

    @cached_property
    def values(self) -> dict[str, Any] | None:
        """The values of the swept settings, if the stage belongs to a point of a sweep."""
        points = reading.read_json(self.path.parent.parent / SWEEP).get("points", ())
        return next((p["values"] for p in points if p["label"] == self.path.parent.name), None)


@dataclass(frozen=True)
class Group:
    """Entries that differ only in seeds."""

    label: str
    entries: list[Entry]

    @property
    def finished(self) -> list[Entry]:
        return [e for e in self.entries if e.finished]

    def having(self, metric: str) -> list[Entry]:
        """The finished entries with the metric; if none has finished, the first entry, if it has the metric."""
        return [e for e in self.finished or self.entries[:1] if metric in e.numbers]

    def mean(self, metric: str) -> Interval | None:
        """Mean and interval over entries with the metric; for a single entry, an evaluate stage's interval if any."""
        entries = self.having(metric)
        if len(entries) == 1 and (row := entries[0].evaluated.get(metric)):
            return Interval(row["value"], row["low"], row["high"], row["n"])
        return mean_interval([e.numbers[metric] for e in entries]) if entries else None

    def by_seed(self, metric: str) -> dict[object, float]:
        """Seeds of each finished entry -> its metric."""
        return {e.seeds: e.numbers[metric] for e in self.finished if metric in e.numbers}


@dataclass(frozen=True)
class Comparison:
    """Train stages that are compared with each other."""

    stage: str
    """Their name if all have the same, else empty."""
    groups: list[Group]
    metric: str
    warnings: list[str]

    @property
    def entries(self) -> list[Entry]:
        return [e for g in self.groups for e in g.entries]

    @property
    def trained(self) -> list[Group]:
        """The groups of train stages."""
        return [g for g in self.groups if g.entries[0].trained]

    @property
    def root(self) -> Path:
        """The output root of the first entry."""
        return root_of(self.entries[0].path)

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """Setting -> its value in each group that was trained, for settings whose values differ.

        An input stage that only some groups have is a single row with its kind, instead of a row for every setting.
        """
        first = [g.entries[0] for g in self.trained]
        stages = dict.fromkeys(name for e in first for name in e.lineage)
        partial = [n for n in stages if not all(n in e.lineage for e in first)]
        prefixes = tuple(f"{n}." for n in partial)
        names = dict.fromkeys(name for e in first for name in e.settings if not name.startswith(prefixes))
        rows = {name: [e.settings.get(name) for e in first] for name in names}
        rows |= {n: [e.lineage[n]["kind"] if n in e.lineage else None for e in first] for n in partial if "@" not in n}
        return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}

    @cached_property
    def paired(self) -> list[tuple[Group, Group, Interval]]:
        """(first group, another group, difference over their common seeds) for groups with two or more such seeds."""
        first, *others = self.trained or self.groups
        pairs = [(first, g, paired_difference(first.by_seed(self.metric), g.by_seed(self.metric))) for g in others]
        return [(a, b, interval) for a, b, interval in pairs if interval and interval.n > 1]


def compare(paths: list[Path], metric: str | None = None) -> list[Comparison]:
    """Compare train stages; stages of several runs are compared by name.

    Args:
        paths: stages, runs, or sweeps.
        metric: the metric of means and differences. Default: `val_loss_nats`, or `bits_per_byte` if the tokenizers
            differ and all runs have it.

    Raises:
        UserError: there is nothing to compare, or no run has the metric.
    """
    stages_of = {path: {p.absolute(): p for p in stages_at(path)} for path in paths}
    unique = {absolute: p for stages in stages_of.values() for absolute, p in stages.items()}
    entries = [Entry(p) for p in unique.values() if reading.record(p)["kind"] in ("train", "import")]
    entries = [e for e in entries if e.trained or e.evaluated]
    if not entries:
        raise UserError(f"{', '.join(map(str, paths))}: no train stage has started there; run the recipe first")
    by_stage: dict[str, list[Entry]] = {}
    for entry in (e for e in entries if e.trained):
        by_stage.setdefault(entry.stage, []).append(entry)
    imported, named = [e for e in entries if not e.trained], {path.absolute() for path in paths}
    several = {name: same for name, same in by_stage.items() if len({e.key for e in same}) > 1}
    single = [same[0].label for same in by_stage.values() if len(same) == 1]
    comparisons = [
        _comparison(name, [*(e for e in imported if e.path.absolute() in named or _is_behind(e, same)), *same], metric)
        for name, same in several.items()
    ] or [_comparison("", sorted(entries, key=lambda e: e.trained), metric)]
    warnings = comparisons[0].warnings
    if several and single:
        warnings.append(f"{', '.join(single)}: no other run has a stage of that name, so it is not compared")
    compared = {e.path.absolute() for e in entries}
    if unmeasured := [str(path) for path, stages in stages_of.items() if not compared & stages.keys()]:
        warnings.append(
            f"{', '.join(unmeasured)}: no train stage there, and no imported model that an evaluate stage of its run "
            "has measured; an evaluate stage compares such models"
        )
    metrics = {name for e in entries for name in e.numbers}
    if metric and metric not in metrics:
        raise UserError(f"--metric {metric}: no run has it; {nearest(metric, metrics)}")
    return comparisons


def _is_behind(imported: Entry, entries: Iterable[Entry]) -> bool:
    """Whether one of the entries began as the imported model."""
    return any(imported.key == record["key"] for e in entries for record in e.lineage.values())


def _comparison(stage: str, entries: list[Entry], metric: str | None) -> Comparison:
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    unique = [same[0] for same in by_key.values()]
    _set_labels(unique, stage)
    by_group: dict[str, list[Entry]] = {}
    for entry in unique:
        by_group.setdefault(entry.group, []).append(entry)
    groups = [Group(_group_label(members), members) for members in by_group.values()]
    return Comparison(stage, groups, metric or _metric(unique), list(_warnings(unique, by_key.values())))


def _metric(entries: list[Entry]) -> str:
    """The validation loss, or what compares where that does not: bits per byte, or what evaluate stages measured."""
    if all(e.trained for e in entries):
        by_bits = len({e.tokenizer for e in entries}) > 1 and all(BITS in e.numbers for e in entries)
        return BITS if by_bits else LOSS
    return next((name for name in entries[0].evaluated if all(name in e.evaluated for e in entries)), LOSS)


def _warnings(entries: list[Entry], by_key: Iterable[list[Entry]]) -> Iterable[str]:
    if copies := [f"{e.label} as {first.label}" for first, *others in by_key for e in others]:
        yield f"the same results are shown once: {', '.join(copies[:3])}{', ...' if len(copies) > 3 else ''}"
    for e in entries:
        if not e.finished:
            at = f"at step {e.step:,} of {e.facts.get('steps', 0):,}"
            why = f"failed {at} ({e.failure})" if e.failure else f"not done, {at}"
            yield f"{e.label}: {why}; the numbers are those of its last evaluation"
    trained = [e for e in entries if e.trained]
    for before in (e for e in entries if not e.trained):
        if after := [e.label for e in trained if _is_behind(before, [e])]:
            yield f"{before.label} was imported; {', '.join(after)} began as it"
    objectives = dict.fromkeys(str(e.settings.get("objective.kind")) for e in trained)
    if len(objectives) > 1 and not objectives.keys() <= LIKELIHOODS:
        yield f"the objectives differ ({', '.join(objectives)}), so losses are not comparable; use a judge stage"
    if len({e.tokenizer for e in entries}) > 1:
        instead = (
            ", bits per byte are" if all(BITS in e.numbers for e in entries) else "; compare answers with a judge stage"
        )
        yield f"the tokenizers differ: losses in nats per token are not comparable{instead}"
    if len({e.corpora for e in trained}) > 1:
        yield "the corpora differ, and with them the held-out text; compare on one text with an evaluate stage"


def _set_labels(entries: list[Entry], stage: str) -> None:
    """Set the shortest distinct labels: without the names of the stage and the run if all entries share them."""
    runs = {e.run for e in entries}
    for e in entries:
        name = (e.name.removesuffix(stage).rstrip("/") if stage else e.name) or ("" if len(runs) > 1 else e.name)
        e.label = "/".join(filter(None, (e.run if len(runs) > 1 else "", name)))
    repeated = Counter(e.label for e in entries)
    for e in entries:
        if repeated[e.label] > 1:
            e.label = f"{e.label} ({e.key[:8]})"


def _group_label(entries: list[Entry]) -> str:
    first = entries[0]
    if len(entries) == 1:
        return first.label
    if all(e.values and e.run == first.run for e in entries):
        names = short_names(first.values or {})
        return (
            ",".join(f"{names[n]}={value_label(v)}" for n, v in (first.values or {}).items() if n != SEED) or first.run
        )
    return f"{first.label} and {len(entries) - 1} more"


def _lineage(record: Mapping[str, Any], root: Path, name: str = "") -> Iterable[tuple[str, dict[str, Any]]]:
    """(name, record) of a stage, whose own name is "", and of all its direct and indirect inputs."""
    yield name, dict(record)
    for source in record["inputs"].values():
        if input_record := reading.record(root / source["dir"]):
            yield from _lineage(input_record, root, source["name"])


def _without_seed(record: Mapping[str, Any]) -> dict[str, Any]:
    canonical = {k: v for k, v in record["canonical"].items() if k != "seed"}
    return {"canonical": canonical, **{k: record[k] for k in ("kind", "version", "raw")}}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value}
    return out
