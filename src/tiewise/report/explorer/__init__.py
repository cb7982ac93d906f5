"""One offline page about tying: a story, a budget, two gradients, and the user's checkpoint.

    page.py     facts and parts of the page; `explore`
    web/        the page: modules of plain JavaScript, joined into one script, and a style sheet

A section of the page is one module that exports `{ id, title, draw(place) }` and one line in `main.js`.
"""
