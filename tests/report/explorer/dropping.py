"""Checkpoints dropped on the page, as a person would, and what it made of them."""


def drop(shown, path, answered=True):
    """Choose a folder, or a single file; wait until the tensors or a refusal are shown, and the scores if asked."""
    page = shown.page
    page.evaluate("for (const id of ['tensors', 'refused', 'copy-issue']) document.getElementById(id)?.remove()")
    page.set_input_files("#folder" if path.is_dir() else "#files", path)
    page.locator("#tensors, #refused").first.wait_for(timeout=30_000)
    if answered:
        page.locator("#copy-issue").wait_for(timeout=30_000)
    return page


def refusal(shown, path):
    """The one sentence that a folder is refused with."""
    page = drop(shown, path, answered=False)
    assert page.locator("#tensors").count() == 0
    return page.locator("#refused").inner_text()
