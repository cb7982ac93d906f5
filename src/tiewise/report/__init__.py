"""Views for a reader: terminal and pages, made of the same `Found`s (`tiewise.core.found`).

- `faces`, `figures`: sentences, tables and figures of any `Found`.
- `sheet`: the one page, a template that escapes by itself.
- `comparison_*`, `plan_*`: what each command shows.
"""
