"""Benchmarks and checks on this machine; each module is a program."""
