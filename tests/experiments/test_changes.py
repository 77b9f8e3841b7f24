"""How --set changes an experiment, and what a report calls it."""

import pytest

from fairseq_rskip.tools.experiments.changes import changes_of
from fairseq_rskip.tools.experiments.plan import Selection, make_tables

FILE = """
data: digits
seeds: [1]
metric: error
options: {depth: 8, iterations: 1000, warmup-iterations: 100, batch-size: 32}
rows: [{label: 1xSkip, options: {skip-kind: xskip, skip-lambda: 1, skip-norm: none}}]
"""


@pytest.mark.parametrize(
    "changes, are_none, name",
    [
        ([], True, "small"),
        (["iterations=1000", "warmup-iterations=100"], True, "small"),
        (["iterations=1000", "warmup-iterations=3"], False, "small-warmup-iterations-3"),
        (["iterations=500"], False, "small-scale0.5"),
        (["iterations=500", "warmup-iterations=50"], False, "small-scale0.5"),
        (
            ["iterations=500", "warmup-iterations=3"],
            False,
            "small-scale0.5-warmup-iterations-3",
        ),
    ],
)
def test_a_warm_up_belongs_to_the_length_where_it_is_in_proportion(
    tmp_path, changes, are_none, name
):
    """Another one makes another experiment, whose report may not call itself the file's."""
    path = tmp_path / "small.yaml"
    path.write_text(FILE)
    (experiment,) = make_tables([str(path)], Selection(changes=changes))
    actual = changes_of(experiment)
    assert (actual.are_none, actual.name(experiment)) == (are_none, name)
