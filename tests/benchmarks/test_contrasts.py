"""Test contrasts with another reference against differences of losses by hand."""

from benchmarks.contrasts import Contrast, contrast_rows
from tests.report.comparison_sample import sample_comparison


def test_rows_subtract_losses_of_the_named_reference():
    made = sample_comparison(("untied", "tied", "factored:64"))
    pairs = [("tied", "untied"), ("factored:64", "tied")]
    rows = contrast_rows({"cell": made}, [Contrast("cell", arm, reference) for arm, reference in pairs])
    assert [(row["arm"], row["reference"]) for row in rows] == pairs
    for row in rows:
        losses = {arm: [run.heldout_nll for run in made.of(arm)] for arm in (row["arm"], row["reference"])}
        mean, reference = (sum(values) / len(values) for values in losses.values())
        assert float(row["difference"]) == round(mean - reference, 5)
        assert float(row["low"]) < float(row["difference"]) < float(row["high"])
        assert int(row["seeds"]) == len(losses[row["arm"]])
        assert int(row["parameters"]) == made.of(row["arm"])[0].total_parameters
