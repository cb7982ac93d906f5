"""Reviewed messages of every command.

`NAME.txt` has the messages of one command: command lines, and the answer or error of each.

    $ tiewise check nowhere
    tiewise: nowhere: no such file or folder; check the path
    exit 2

A line runs in a new folder with the inputs that it names (`tests/answers/inputs.py`). Of standard output, the file has
the first line, which is the answer; `tests/answers` records the rest. It has all of standard error, and the exit code
unless it is 0.

To add a message, write its command line into the file, starting with `$ tiewise `, and record:

    python -m tests.messages.record              # every file
    python -m tests.messages.record check tie    # these files

Read the difference aloud before you commit it. A line of text that starts with `#` is a heading, and stays.
"""
