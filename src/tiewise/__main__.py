"""`python -m tiewise`: the command line, also for launchers (`torchrun --nproc_per_node 2 -m tiewise train …`)."""

from tiewise.cli.main import main

if __name__ == "__main__":
    main()
