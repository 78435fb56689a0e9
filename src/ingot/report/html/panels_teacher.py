"""Predictions of a teacher and its students for sampled positions of held-out text, side by side."""

from pathlib import Path
from typing import Any

from ingot.report import figures, reading


def predictions(stage: Path) -> list[dict[str, Any]]:
    """The sampled positions of an evaluate stage with a teacher, for the template.

    Returns:
        {task, before, label, headings, rows}: the first heading and cell of each row are those of the rank, the others
        those of a model, the teacher first. The first row has each model's probability of the label. A cell is
        {text, shared}, `shared` if the token is among the teacher's.
    """
    teacher = reading.record(stage).get("settings", {}).get("teacher")
    newest: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for event in reading.events(stage, "prediction"):
        newest.setdefault((event["task"], event["number"]), {})[event["model"]] = event
    return [_position(task, models, teacher) for (task, _), models in newest.items() if teacher in models]


def _position(task: str, models: dict[str, dict[str, Any]], teacher: str) -> dict[str, Any]:
    names = [teacher, *(name for name in models if name != teacher)]
    known = {text for text, _ in models[teacher]["likely"]}
    label = [{"text": _percentage(models[name]["p_label"]), "shared": False} for name in names]
    ranks = [
        [
            {"text": f"{figures.visible(text)} {_percentage(p)}", "shared": name != teacher and text in known}
            for name in names
            for text, p in models[name]["likely"][rank : rank + 1]
        ]
        for rank in range(len(models[teacher]["likely"]))
    ]
    return {
        "task": task,
        "before": models[teacher]["before"],
        "label": figures.visible(models[teacher]["label"]),
        "headings": ["rank", teacher if teacher == "teacher" else f"{teacher} (teacher)", *names[1:]],
        "rows": [("label", label), *((str(rank + 1), cells) for rank, cells in enumerate(ranks))],
    }


def _percentage(p: float) -> str:
    return f"{100 * p:.1f} %"
