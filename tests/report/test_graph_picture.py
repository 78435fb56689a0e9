"""The graph of stages: which edges are drawn and where boxes stand."""

import re

from ingot.report.html.graph_picture import BOX_WIDTH, Box, columns, draw, reduced

STAGES = {
    "clean": (),
    "questions": (),
    "bpe": ("clean",),
    "clean@bpe": ("clean", "bpe"),
    "base": ("bpe", "clean@bpe"),
    "questions@bpe": ("questions", "bpe"),
    "chat": ("base", "bpe", "questions@bpe", "clean@bpe"),
    "card": ("base", "chat", "questions@bpe", "clean@bpe"),
}


def test_edges_that_follow_from_others_are_left_out():
    assert reduced(STAGES) == {
        "clean": [],
        "questions": [],
        "bpe": ["clean"],
        "clean@bpe": ["bpe"],
        "base": ["clean@bpe"],
        "questions@bpe": ["questions", "bpe"],
        "chat": ["base", "questions@bpe"],
        "card": ["chat"],
    }


def test_inputs_stand_left_of_their_readers_and_close_to_them():
    column = columns(reduced(STAGES))
    assert all(column[source] < column[name] for name, sources in STAGES.items() for source in sources)
    assert column["questions"] == column["questions@bpe"] - 1


def test_boxes_do_not_overlap():
    svg = str(draw([Box(n, "train", "done", "1 s", inputs) for n, inputs in STAGES.items()]))
    places = [(float(x), float(y)) for x, y in re.findall(rf"<rect x=(\S+) y=(\S+) width={BOX_WIDTH}", svg)]
    assert len(places) == len(STAGES)
    assert all(
        abs(x0 - x1) >= BOX_WIDTH or abs(y0 - y1) >= 64 for i, (x0, y0) in enumerate(places) for x1, y1 in places[:i]
    )


def test_one_stage_and_hostile_names():
    svg = str(draw([Box("<script>", "corpus", "not run", "", ())]))
    assert "&lt;script&gt;" in svg
    assert "<script" not in svg
