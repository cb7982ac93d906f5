"""Helpers that drop checkpoints on the page and read its refusals."""


def drop(shown, path, answered=True):
    """Choose a folder or file, and wait for its tensors or a refusal.

    If `answered` is true, also wait for the scores.
    """
    page = shown.page
    page.evaluate("for (const id of ['tensors', 'refused', 'copy-issue']) document.getElementById(id)?.remove()")
    page.set_input_files("#folder" if path.is_dir() else "#files", path)
    page.locator("#tensors, #refused").first.wait_for(timeout=30_000)
    if answered:
        page.locator("#copy-issue").wait_for(timeout=30_000)
    return page


def refusal(shown, path):
    """Return the sentence that refuses `path`."""
    page = drop(shown, path, answered=False)
    assert page.locator("#tensors").count() == 0
    return page.locator("#refused").inner_text()
