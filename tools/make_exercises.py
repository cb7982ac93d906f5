"""Write docs/reference-exercises.md from the exercises of the package: `python tools/make_exercises.py`."""

from pathlib import Path

from tiewise.lab.exercises import EXERCISES

PAGE = Path(__file__).parents[1] / "docs" / "reference-exercises.md"
BEGIN = f"""# Exercises

{len(EXERCISES)} exercises on the two ends of a language model. Write the function that is asked for into a file of
your own; its arguments are numbers and numpy arrays, and any library may help:

<!-- part: mine.py is yours -->
```sh
tiewise exercise 3               # the statement; --hint and --solution print more
tiewise exercise 3 mine.py       # right, or where it is wrong and, for the usual mistakes, why
```

Your file runs in a process of its own, with a minute of time and the memory that the exercise grants.
"""


def page() -> str:
    """Return the page: each exercise with its hint and its solution folded."""
    parts = [BEGIN]
    for number, exercise in sorted(EXERCISES.items()):
        title, statement, hint, solution = exercise.text()
        parts.append(f"## {number}. {title}\n\n{statement}\n")
        for name, text in (("Hint", hint), ("Solution", solution)):
            parts.append(f'<details markdown="1"><summary>{name}</summary>\n\n{text}\n\n</details>\n')
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
