"""One page to see tying with one's own eyes, offline: a story, a budget, two gradients, and a checkpoint of one's own.

    page.py     what the page is told and made of; `explore`
    web/        the page itself: modules of plain JavaScript, joined into one script, and a style sheet

A section of the page is one module that exports `{ id, title, draw(place) }` and one line in `main.js`.
"""
