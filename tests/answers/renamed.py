"""What recorded answers are called by now: (case and path as recorded, path now or None for gone, why).

The first part is matched as a regular expression against `case:/path/of/a/leaf`; the second may use its groups.
"""

RENAMED: list[tuple[str, str | None, str]] = [
    (
        r"^inspect (pair )?tables:/sections/evidence/found//rows/1/",
        None,
        "alignment after the best rotation could favour neither side: it is no evidence and stays in its section",
    ),
    (
        r"/sections/\w+/found/[^/]*/(answer|(curves|points)/\d+/why)$",
        None,
        "answers and captions are words, which may be put better any day; a short one was taken for a name",
    ),
    (r":/env/processor$", None, "the name of the machine's processor, which is another elsewhere"),
    (
        r"^inspect comparison:/sections/alignment/found/factored:4/curves/[01]/[xy]\[\]",
        None,
        "how many singular values rounding leaves of tables of rank 4: processors differ, their sum does not",
    ),
    (
        r"^plan sizes:/choices/\d+/ranks/[12]/sent(_for_tables)?$",
        None,
        "measured on ranks: FSDP2 gathers tables once a step, not twice; the loss gathers two numbers a token",
    ),
    (r"^check .*/rules/ran/length$", None, "rules were added; which ran is recorded by name"),
    (
        r"^check [^:]*:(/audits/\d+)?/loaders/5/(source|predicted)$",
        None,
        "mlx-lm is run with a tiny model of the family, and was only read",
    ),
]
