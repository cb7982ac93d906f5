"""Colours that mean the same in every figure and page: each boundary's, and those of negative and positive numbers.

Mid tones, with a contrast of at least 3 : 1 on both page backgrounds; they never carry meaning alone.
"""

COLOURS = ("#2f7fd1", "#d1660a", "#2a9468", "#9466d6", "#d4475a", "#13879a", "#9a7b12", "#c4559c")
# the place in these of each boundary, whatever the figure
PLACES = {"tied": 0, "untied": 1, "factored": 2, "projected": 3, "residual": 4, "spd": 5, "factored-untied": 6}
PATHS = {"lookup-path": 5, "head-path": 7}  # of the two gradients of a table
BACKGROUNDS = {"light": "#fbfaf8", "dark": "#17191d"}  # the same as --page in report/templates/report.css
# from negative over zero to positive
DIVERGING = {"light": ("#2166ac", "#f7f5f1", "#b2441a"), "dark": ("#5aa2ea", "#1f2227", "#ee8a4a")}
