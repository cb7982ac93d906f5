"""The command line: `main` imports only the command that is called; what commands share stands in `options`."""
