"""Upload of a finished run to the Hugging Face Hub: model, card and report.

All files arrive in one commit, so a repository never has half of an upload. If an upload fails, the run stays as it
is, and the error has the command that uploads again. No message contains the token.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    logging,
    validate_repo_id,
)

from tiewise.core.errors import RunError, one_line_message
from tiewise.inspection.running.passages import Healed
from tiewise.report.model_card import comparison_card, healed_card, run_card
from tiewise.training.data.corpus import FACTS
from tiewise.training.folder import DATA, ENVIRONMENT, REPORT, RESULTS, read_json, saved_run, seed_folder
from tiewise.training.results import DENSE, FINAL, Comparison, RunResult, SingleRun

CARD = "README.md"
LOWER_RATE = "try a lower --set learning_rate"
FAILURES = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)  # exceptions of an upload
# problem and remedy by HTTP status; {} is the repository
ANSWERS = {
    401: ("the Hub does not accept the token", "log in with `hf auth login`"),
    403: ("the token cannot write to {}", "make a token with write access to it"),
    404: ("the Hub has no repository {} that this token can see", "check the name"),
    429: ("the Hub accepts no more requests for now", "wait some minutes"),
}


@dataclass(frozen=True)
class HubCommit:
    """Files of a finished run for a repository of the Hub, by their path there."""

    repo_id: str
    files: dict[str, Path | bytes]
    message: str  # of the commit
    later: str  # command that uploads the same files again


def require_repo_id(repo_id: str | None) -> None:
    """Raise RunError for text that names no repository of the Hub; None passes."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        remedy = "write USER/NAME with letters, digits, -, _ and ."
        raise RunError(f"{repo_id!r} cannot be a repository of the Hub", remedy) from None


def missing_for_push() -> tuple[str, str] | None:
    """Return problem and remedy if nothing can be uploaded from here, else None."""
    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE keeps this process off the Hub", "unset HF_HUB_OFFLINE"
    if huggingface_hub.get_token() is None:
        return "no token of the Hub is stored here", "log in with `hf auth login`, or set HF_TOKEN"
    return None


def warning_before_training(command: str, out: Path, repo_id: str) -> str | None:
    """Return the warning of a command that cannot upload at its end; None if it can."""
    missing = missing_for_push()
    if missing is None:
        return None
    problem, remedy = missing
    if huggingface_hub.is_offline_mode():  # stays so until this process ends
        return f"the upload will be left out: {problem}; {remedy}, then {upload_command(command, out, repo_id)}"
    return f"--push-to-hub will fail: {problem}; log in with `hf auth login` before the training ends"


def push_to_hub(result: Comparison | SingleRun | Healed, repo_id: str) -> str:
    """Upload a comparison's report and best model, or the model of a run; return the address.

    The best model is the best seed of the arm with the lowest mean validation loss. The repository is made if it
    does not exist.

    RunError: the upload failed.
    """
    upload = _files_of(result, repo_id)
    missing = missing_for_push()
    if missing is not None:
        raise _failure(upload, *missing)
    with _quiet_client():
        try:
            return _commit(upload)
        except FAILURES as error:
            raise _failure(upload, *_explain(error, repo_id)) from None


def _files_of(result: Comparison | SingleRun | Healed, repo_id: str) -> HubCommit:
    """Return the files of a result for the Hub; RunError if its model has diverged."""
    if isinstance(result, Comparison):
        return _comparison_upload(result, repo_id)
    if isinstance(result, Healed):
        return _healed_upload(result, repo_id)
    return _run_upload(result, repo_id)


def best_run(comparison: Comparison) -> RunResult | None:
    """Return the best seed of the arm with the lowest mean validation loss.

    None if all arms have diverged.
    """
    arms = [comparison.of(arm) for arm in comparison.arms]
    finite = [runs for runs in arms if runs and all(math.isfinite(run.heldout_nll) for run in runs)]
    if not finite:
        return None
    best_arm = min(finite, key=lambda runs: fmean(run.heldout_nll for run in runs))
    return min(best_arm, key=lambda run: run.heldout_nll)


def _comparison_upload(comparison: Comparison, repo_id: str) -> HubCommit:
    """Return the files of a comparison for the Hub; RunError if no model is usable."""
    assert comparison.folder is not None, "a finished comparison has a folder"
    chosen = best_run(comparison)
    if chosen is None:
        raise RunError("every arm has diverged, so no model is uploaded", LOWER_RATE)
    folder = seed_folder(comparison.folder, chosen.arm, chosen.seed)
    card = comparison_card(comparison, chosen, folder, repo_id)
    files = _model_files(folder) | {name: comparison.folder / name for name in (RESULTS, REPORT)}
    message = f"Add {chosen.arm} of a comparison of {', '.join(comparison.arms)}"
    later = upload_command("compare", comparison.folder, repo_id)
    return HubCommit(repo_id, files | {CARD: card.encode()}, message, later)


def _run_upload(trained: SingleRun, repo_id: str) -> HubCommit:
    """Return the files of a single run for the Hub; RunError if it has diverged."""
    out = trained.folder.parent.parent
    if not math.isfinite(trained.result.heldout_nll):
        raise RunError("the run has diverged, so no model is uploaded", LOWER_RATE)
    card = run_card(trained, _command_of(out), repo_id)
    files = _model_files(trained.folder) | {CARD: card.encode()}
    return HubCommit(repo_id, files, f"Add {trained.result.arm}", upload_command("train", out, repo_id))


def _healed_upload(healed: Healed, repo_id: str) -> HubCommit:
    """Return the files of a healed model for the Hub; RunError if it has diverged."""
    if not math.isfinite(healed.left.after):
        raise RunError("the run has diverged, so no model is uploaded", LOWER_RATE)
    run = Path(healed.model).parent
    out = run.parent.parent
    arm, data = saved_run(out).arms[0], read_json(out / DATA / FACTS)
    card = healed_card(healed, arm, data, _command_of(out), repo_id)
    files = _model_files(run) | {CARD: card.encode()}
    return HubCommit(repo_id, files, f"Add {arm}, healed", upload_command("heal", out, repo_id))


def _command_of(out: Path) -> str:
    """Return the command that started the run in `out`."""
    command: str = (read_json(out / ENVIRONMENT) or {}).get("command", "")
    return command


def _model_files(run: Path) -> dict[str, Path | bytes]:
    """Return the files of a run's model, and those of its dense form below `dense`."""
    files: dict[str, Path | bytes] = {path.name: path for path in sorted((run / FINAL).iterdir()) if path.is_file()}
    if (run / DENSE).is_dir():
        files |= {f"{DENSE}/{path.name}": path for path in sorted((run / DENSE).iterdir())}
    return files


def upload_command(command: str, out: Path, repo_id: str) -> str:
    """Return the command that uploads a finished run."""
    return shlex.join(["tiewise", command, "--out", str(out), "--resume", "--push-to-hub", repo_id])


def _commit(upload: HubCommit) -> str:
    """Make the repository if needed, and commit all files at once; return its address."""
    api = HfApi()
    address = api.create_repo(upload.repo_id, exist_ok=True)
    before = api.list_repo_files(address.repo_id)
    stale = [name for name in before if _is_weight(name) and name not in upload.files]
    operations = [CommitOperationDelete(name) for name in stale]
    operations += [CommitOperationAdd(name, file) for name, file in upload.files.items()]
    api.create_commit(address.repo_id, operations, commit_message=upload.message)
    return str(address)


def _is_weight(name: str) -> bool:
    """Return whether a file of a repository has weights, perhaps of an earlier upload."""
    return name.startswith(f"{DENSE}/") or (name.startswith("model") and ".safetensors" in name)


def _failure(upload: HubCommit, problem: str, remedy: str) -> RunError:
    """Return the error of an upload, with the command that tries again."""
    return RunError(f"not uploaded to {upload.repo_id}: {problem}", f"{remedy}, then {upload.later}")


def _explain(error: BaseException, repo_id: str) -> tuple[str, str]:
    """Return problem and remedy of a failed upload."""
    status = _status_of(error)
    if status in ANSWERS:
        problem, remedy = ANSWERS[status]
        return problem.format(repo_id), remedy
    if status is not None:
        return f"the Hub answered with status {status}", "wait some minutes"
    if isinstance(error, FAILURES[0]):
        return f"cannot reach {_endpoint()}", "check the network"
    text = one_line_message(error)
    token = huggingface_hub.get_token()
    return text.replace(token, "TOKEN") if token else text, "correct that"


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error; None if no answer came."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            status: int = response.status_code
            return status
        error = error.__cause__ or error.__context__
    return None


def _endpoint() -> str:
    """Return the address of the Hub without a name and a password in it."""
    scheme, _, rest = huggingface_hub.constants.ENDPOINT.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Hide progress bars and warnings of the Hub's client."""
    had_bars, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()
