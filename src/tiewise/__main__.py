"""`tiewise`, and `python -m tiewise` for launchers (`torchrun --nproc_per_node 2 -m tiewise train …`)."""

import sys

from tiewise.core.interrupts import is_caused_by_ctrl_c, listen_for_ctrl_c


def main() -> None:
    """Run the command line; Ctrl-C is clean from here on, also while the command line itself is being imported."""
    listen_for_ctrl_c()
    try:
        try:
            from tiewise.cli.main import main as run
        except (Exception, KeyboardInterrupt) as error:
            if not is_caused_by_ctrl_c(error):
                raise
            sys.exit(130)
        run()
    finally:
        # A Ctrl-C in code that is made from text, as every dataclass is, leaves a mark in CPython by which `python -m`
        # ends as if nobody had caught it, killed by the signal. The next code made from text takes the mark away.
        exec("")


if __name__ == "__main__":
    main()
