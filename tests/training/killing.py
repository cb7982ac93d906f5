"""A child process that is expected to end by itself, killed or not."""


def killed(context, target, *arguments):
    """Run `target` in a process of its own; return its exit code."""
    child = context.Process(target=target, args=arguments)
    child.start()
    child.join(120)
    assert not child.is_alive()
    return child.exitcode
