"""Terminal views and pages, made from the same `Measurement`s (`tiewise.core.measurement`).

- `views`, `figures`: sentences, tables and figures of any `Measurement`.
- `report_page`: the common page, whose template escapes texts automatically.
- `comparison_*`, `plan_*`: the views of each command.
"""
