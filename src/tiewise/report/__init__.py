"""Views for a reader: terminal and pages, made of the same `Measurement`s (`tiewise.core.measurement`).

- `views`, `figures`: sentences, tables and figures of any `Measurement`.
- `report_page`: the one page, a template that escapes by itself.
- `comparison_*`, `plan_*`: what each command shows.
"""
