"""The command line.

`main` imports only the command that is called. `options` has the options that commands share.
"""
