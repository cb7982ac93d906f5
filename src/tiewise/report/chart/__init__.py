"""Static charts: plotly's figures as SVG that needs no script.

tick_text   texts of numbers along an axis
text_width  estimated widths of texts
axis        scales and ticks
symbols     shapes of markers, and patterns of bars
marks       lines, dots, bars and cells
labels      texts along both axes
legend      key of colours, dashes and markers
chart       all of them together
"""
