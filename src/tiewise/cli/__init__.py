"""The command line: `main` knows the commands by name and imports only the one that is called.

Options that commands share are in `options`, the bar of long reads and long work in `reading`.
"""
