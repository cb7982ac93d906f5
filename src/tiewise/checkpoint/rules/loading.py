"""B080: whether every loader makes the same model of the folder."""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.checkpoint.claims import OWN_TYPE
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.loaders import LOST, predict
from tiewise.checkpoint.rule import ERROR, INFO, WARNING, Finding, Rule, names


def _loaders(facts: Facts) -> Iterator[Finding]:
    outcomes = predict(facts)
    wrong = [outcome for outcome in outcomes if outcome.right is False]
    if not wrong:
        return
    own = facts.config.get("model_type") == OWN_TYPE
    mended = {outcome.loader for outcome in outcomes if outcome.right}
    lost = any(outcome.outcome in LOST for outcome in wrong) and not own
    note = own or all(outcome.loader in mended for outcome in wrong)  # another version of each makes the right model
    listed = names([f"{outcome.loader} {outcome.versions}: {outcome.outcome}" for outcome in wrong], most=len(wrong))
    what = f"{len(wrong)} of {len(outcomes)} loaders make another model of these tensors, or none: {listed}"
    fix = "repair the other findings, or load it with the rest"
    if len(wrong) == len(outcomes):
        fix = f"repair the other findings; {wrong[0].loader} {wrong[0].versions}: {wrong[0].sentence}"
    fix = f"export it dense: {facts.command('densify')}" if own else fix
    yield Finding("B080", ERROR if lost else INFO if note else WARNING, facts.path.name, what, fix)


RULES = (
    Rule(
        "B080",
        WARNING,
        "every loader makes the same model of it",
        """Loaders decide by different things: transformers by the flag of one level of the config, vLLM by any level,
llama.cpp mostly by which tensors are stored, mlx-lm by the flag with a default of its own. One folder can so be two
models, or a random one. The table of loaders in the report says for each what it will do, for which versions, and
whether this package's tests load the very case or it is predicted from source and threads. A warning where a loader
makes another model; an error where one fails or draws something at random. Where another rule names the cause,
repairing that settles this too. Some cases are the loader's own: llama.cpp passes over a
separate head of Gemma 2 (llama.cpp#9065), and only transformers knows tiewise's factored tables.
What to do: repair the causes; where only the loader is to blame, use another, or make one table (`tiewise tie`).""",
        ("vllm#51063", "vllm#51665", "transformers#42507", "llama.cpp#9065", "llama.cpp#13328"),
        _loaders,
    ),
)
