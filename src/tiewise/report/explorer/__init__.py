"""One page that shows tying, offline: a story, a budget, two gradients, and a checkpoint of the reader.

    page.py     facts and parts of the page; `explore`
    web/        the page itself: modules of plain JavaScript, joined into one script, and a style sheet

A section of the page is one module that exports `{ id, title, draw(place) }` and one line in `main.js`.
"""
