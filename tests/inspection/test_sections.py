"""What every section has: a file, a question and a place."""

from dataclasses import replace

from tiewise.inspection.inspection import SECTIONS, sections


def test_every_file_of_the_folder_is_one_section_with_a_question_and_a_place():
    found = sections()
    assert {one.name for one in found} == set(SECTIONS) >= {"lens", "refinement", "gradients_over_training"}
    assert all(one.asks.endswith("?") for one in found)
    assert len({one.place for one in found}) == len(found)
    in_order = sorted(found, key=lambda s: s.place)
    assert [replace(one, measure=None).name for one in found] == [one.name for one in in_order]
