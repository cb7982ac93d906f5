"""`tiewise`, and `python -m tiewise` for launchers (`torchrun --nproc_per_node 2 -m tiewise train …`)."""

import sys

from tiewise.core.interrupts import is_caused_by_ctrl_c, listen_for_ctrl_c


def main() -> None:
    """Run the command line.

    From here on Ctrl-C prints no traceback, even while the command line itself is imported.
    """
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
        # If Ctrl-C interrupts code that is compiled from text, as every dataclass is, CPython sets a flag. Because of
        # it `python -m` ends as if killed by the signal, although the exception was caught. `exec` clears the flag.
        exec("")


if __name__ == "__main__":
    main()
