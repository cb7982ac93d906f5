"""Test that each checker accepts the solution and three other right answers, and explains three mistakes."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tiewise.cli.main import command_line
from tiewise.core.errors import RunError
from tiewise.lab.exercises import EXERCISES, find_fault

# Right answers, and mistakes with their messages, by number of the exercise. {edit:…→…} is one edit of the solution.
# Every file begins with the import of numpy.
RIGHT = {
    1: [
        "def saved(v, d, layers):\n    whole = 2*v*d + layers*12*d**2\n    return [v*d, v*d/whole]",
        "def saved(v, d, layers):\n    return np.array([v*d, 1/(2 + 12*layers*d/v)])",
        "saved = lambda v, d, layers: (float(v*d), (v/d)/(2*v/d + 12*layers))",
    ],
    2: [
        """
def gradient(w, ids, targets, h, upstream):
    g = np.zeros(w.shape)
    for t in range(len(ids)):
        z = np.exp(w @ h[t]); p = z / z.sum()
        for j in range(len(w)):
            g[j] += (p[j] - (j == targets[t])) * h[t]
        g[ids[t]] += upstream[t]
    return g
""",
        """
import torch
def gradient(w, ids, targets, h, upstream):
    w = torch.tensor(w, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tensor(h) @ w.T, torch.tensor(targets), reduction="sum")
    (loss + (w[torch.tensor(ids)] * torch.tensor(upstream)).sum()).backward()
    return w.grad
""",
        """
from scipy.special import softmax
def gradient(w, ids, targets, h, upstream):
    one = np.eye(len(w))
    return (softmax(h @ w.T, 1) - one[targets]).T @ h + one[ids].T @ upstream
""",
    ],
    3: [
        """
def gap(m):
    s = (m + m.T)/2
    v, q = np.linalg.eigh(s)
    return np.square(m - (q * v.clip(0)) @ q.T).sum()
""",
        """
from scipy.optimize import minimize
def gap(m):
    n = len(m)
    def f(x):
        w = x.reshape(n, n); r = w @ w.T - m
        return (r**2).sum(), (2*(r + r.T) @ w).ravel()
    x = np.random.default_rng(0).normal(size=n*n)
    return minimize(f, x, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 9999}).fun
""",
        """
def gap(m):
    v = np.linalg.eigvalsh(m + m.T)/2
    return (m**2).sum() - (v[v > 0]**2).sum()
""",
    ],
    4: [
        """
import math
def factored(v, d, k):
    return v*d - v*k - k*d, math.ceil(v*d/(v+d)) - 1
""",
        """
def factored(v, d, k):
    best = max(k for k in range(1, d + 1) if k*(v + d) < v*d)
    return v*d - k*(v + d), best
""",
        """
from fractions import Fraction
def factored(v, d, k):
    at = Fraction(v*d, v + d)
    return (v*d - k*(v + d), at - 1 if at.denominator == 1 else at.numerator // at.denominator)
""",
    ],
    5: [
        """
import jax, jax.numpy as jnp, flax.linen as nn
class M(nn.Module):
    v: int
    d: int
    @nn.compact
    def __call__(self, ids):
        e = nn.Embed(self.v, self.d, embedding_init=nn.initializers.normal(0.02))
        return e.attend(e(ids))
def tied_io_embed(seed, token_ids, vocab_size, d_model):
    ids = jnp.asarray(token_ids).astype(int)
    m = M(vocab_size, d_model)
    return m.apply(m.init(jax.random.PRNGKey(seed), ids), ids).reshape(-1)
""",
        "{edit:table[ids] @ table.T→jnp.einsum('td,vd->tv', table[ids], table)}",
        "{edit:table[ids] @ table.T→jax.nn.one_hot(ids, self.vocab_size) @ table @ table.T}",
    ],
    6: [
        """
def asymmetry(e, u):
    a = np.einsum("vi,vj->ij", e, e); b = np.einsum("vi,vj->ij", u, u); c = e.T @ u
    return 0.5 - 0.5*np.trace(c @ c)/np.trace(a @ b)
""",
        """
def asymmetry(e, u):
    odd = whole = 0
    for s in range(0, len(e), 500):
        m = e[s:s+500] @ u.T; t = u[s:s+500] @ e.T
        odd += ((m - t)**2).sum()/4; whole += (m**2).sum()
    return odd/whole
""",
        """
def asymmetry(e, u):
    q, r = np.linalg.qr(np.hstack([e, u])); d = e.shape[1]
    m = r[:, :d] @ r[:, d:].T
    return np.linalg.norm(m - m.T)**2/4/np.linalg.norm(m)**2
""",
    ],
    7: [
        """
from scipy.special import logsumexp
def loss(h, w, targets):
    return np.mean([logsumexp(w @ x) - w[t] @ x for x, t in zip(h, targets) if t != -100])
""",
        """
import torch
def loss(h, w, targets):
    h, w, t = torch.tensor(h), torch.tensor(w), torch.tensor(targets)
    pieces = zip(h.split(100), t.split(100))
    return sum(torch.nn.functional.cross_entropy(a @ w.T, b, reduction="sum") for a, b in pieces) / (t >= 0).sum()
""",
        """
def loss(h, w, targets):
    keep = targets >= 0; h, t = h[keep], targets[keep]
    top, total = np.full(len(h), -np.inf), np.zeros(len(h))
    for s in range(0, len(w), 1000):
        z = h @ w[s:s+1000].T; new = np.maximum(top, z.max(1))
        total = total*np.exp(top - new) + np.exp(z - new[:, None]).sum(1); top = new
    return (top + np.log(total) - (h*w[t]).sum(1)).mean()
""",
    ],
    8: [
        """
def rnn(c, d, h):
    U, P, W, b, Q, bias, V = c*d, h*d, h*h, h, d*h, c, c*h
    return U + P + W + b + Q + bias, U + P + W + b + V + bias
""",
        """
def rnn(c, d, h):
    tied = [np.empty(s).size for s in ((c, 1), (h, d), (h, h), (h,), (d, h))]
    return sum(tied) + c*d, sum(tied) + c*d - d*h + c*h
""",
        "def rnn(c, d, h):\n    return (c*(d + 1) + h*(2*d + h + 1), c*(d + h + 1) + h*(d + h + 1))",
    ],
    9: [
        "from scipy.linalg import orthogonal_procrustes\ndef align(e, u):\n    return orthogonal_procrustes(e, u)[0]",
        "from scipy.linalg import polar\ndef align(e, u):\n    return polar(e.T @ u)[0]",
        """
def align(e, u):
    r = np.linalg.qr(e.T @ u)[0]; x = e.T @ u
    for _ in range(200):
        x = (x + np.linalg.inv(x).T)/2
    return x
""",
    ],
    10: [
        """
def excess(e, u):
    cos = lambda a, b: a @ b / np.sqrt((a @ a)*(b @ b)); n = len(e)
    own = [cos(e[i], u[i]) for i in range(n)]
    other = [cos(e[i], u[j]) for i in range(n) for j in range(n) if i != j]
    return np.mean(own) - np.mean(other)
""",
        """
from scipy.spatial.distance import cdist
def excess(e, u):
    c = 1 - cdist(e, u, "cosine"); n = len(e)
    return c.trace()/(n - 1) - c.sum()/(n*(n - 1))
""",
        """
import torch
def excess(e, u):
    e, u = (torch.nn.functional.normalize(torch.tensor(x)) for x in (e, u)); n = len(e)
    own = (e*u).sum(1)
    return own.mean() - (e.sum(0) @ u.sum(0) - own.sum())/(n*(n - 1))
""",
    ],
    11: [
        """
def closed(symbols, merges, kept):
    found = set(map(int, kept)) | set(range(symbols))
    while True:
        more = found | {int(p) for t in found if t >= symbols for p in merges[t - symbols]}
        if more == found:
            return sorted(found)
        found = more
""",
        """
def closed(symbols, merges, kept):
    stays = np.zeros(symbols + len(merges), bool); stays[kept] = True; stays[:symbols] = True
    for t in range(len(stays) - 1, symbols - 1, -1):  # a merge comes after its parts
        if stays[t]:
            stays[merges[t - symbols]] = True
    return np.flatnonzero(stays)
""",
        """
def closed(symbols, merges, kept):
    def below(t):
        return {t} if t < symbols else {t} | below(merges[t - symbols][0]) | below(merges[t - symbols][1])
    return sorted(set(range(symbols)).union(*map(below, kept)))
""",
    ],
    12: [
        """
from scipy.special import log_softmax
def fall(w, h, n):
    more = np.vstack([w, np.repeat(w.mean(0)[None], n, 0)])
    return (log_softmax(h @ w.T, 1) - log_softmax(h @ more.T, 1)[:, :len(w)]).mean(1)
""",
        """
def fall(w, h, n):
    p = np.exp(h @ w.T)
    return -np.log(p.sum(1)/(p.sum(1) + n*np.exp(h @ w.mean(axis=0))))
""",
        """
import torch
def fall(w, h, n):
    z = torch.tensor(h) @ torch.tensor(w).T
    more = torch.cat([z, z.mean(1, keepdim=True).expand(-1, n)], 1)
    return more.logsumexp(1) - z.logsumexp(1)
""",
    ],
    13: [
        """
def touched(counts, n):
    total = int(counts.sum())
    return sum(1 - ((total - int(c))/total)**n for c in counts)
""",
        """
def touched(counts, n):
    p = counts/np.sum(counts)
    return -np.expm1(n*np.log1p(-p)).sum()
""",
        """
from scipy.stats import binom
def touched(counts, n):
    return binom.sf(0, n, counts/counts.sum()).sum()
""",
    ],
}
WRONG = {
    1: [
        ("def saved(v, d, layers):\n    return v*d, v*d/(v*d + 12*layers*d*d)", "both tables are in it"),
        ("def saved(v, d, layers):\n    return 2*v*d, 2*v*d/(2*v*d + 12*layers*d*d)", "one of the two tables"),
        ("def saved(v, d, layers):\n    return v*d, v*d/(2*v*d + 4*layers*d*d)", "12·d²"),
    ],
    2: [
        ("{edit:np.add.at(made, ids, upstream)→pass}", "the lookup's gradient is missing"),
        ("{edit:p.T @ h→0 * w}", "the head's gradient"),
        ("{edit:np.add.at(made, ids, upstream)→made[ids] += upstream}", "stands twice"),
    ],
    3: [
        ("def gap(m):\n    return (((m - m.T)/2)**2).sum()", "negative eigenvalue"),
        ("{edit:(antisymmetric**2).sum() + →}", "antisymmetric part of M is missing"),
        (
            "{edit:    return →    x = [*antisymmetric.flat, *values.clip(max=0)]\n    return np.linalg.norm(x)\n    }",
            "squared distance",
        ),
    ],
    4: [
        ("def factored(v, d, k):\n    return v*d - k*v, (v*d - 1)//(v + d)", "map from k to d"),
        ("def factored(v, d, k):\n    return v*d - k*(v + d), v*d//(v + d) + 1", "nothing is saved"),
        ("def factored(v, d, k):\n    return k*(v + d), (v*d - 1)//(v + d)", "what it saves"),
    ],
    5: [
        ("{edit:table.T→self.param('b', nn.initializers.normal(0.02), table.shape).T}", "two tables"),
        ("{edit:normal(0.02)→normal(1.0)}", "and should be drawn with 0.02"),
        ("{edit:.ravel()→}", "flattened"),
    ],
    6: [
        ("{edit:(1 - (cross→(1 + (cross}", "symmetric part's share"),
        ("{edit:.sum()) / 2→.sum()) ** .5 / 2 ** .5}", "a share is of squares"),
        ("{edit:.sum()) / 2→.sum()) * 2}", "not M − Mᵀ"),
    ],
    7: [
        ("{edit:return total / count→return total / len(h)}", "do not count"),
        ("{edit:return total / count→return total}", "sum over positions"),
        ("{edit:at = targets[start : start + 256]→at = targets[start : start + 256] % len(w)}", "no row"),
    ],
    8: [
        ("{edit:c * d + d * h + body→c * d + body}", "second projection"),
        ("{edit: + h + c→}", "biases"),
        ("{edit:c * d + c * h + body→c * d + c * d + body}", "C·H"),
    ],
    9: [
        ("{edit:return left @ right→return (left @ right).T}", "transpose"),
        ("def align(e, u):\n    return np.linalg.pinv(e) @ u", "stretches"),
        ("{edit:return left @ right→return left @ right.T}", "returns its last factor transposed"),
    ],
    10: [
        ("{edit: - off.mean()→}", "mean cosine alone"),
        ("{edit:off.mean()→cosines.mean()}", "do not belong to chance"),
        ("{edit:(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (e, u))→(e, u)}", "divide by both lengths"),
    ],
    11: [
        ("{edit:keep(int(part))→found.add(int(part))}", "parents of the parents"),
        (
            """
def closed(symbols, merges, kept):
    found = set()
    def keep(t):
        found.add(int(t))
        if t >= symbols:
            [keep(p) for p in merges[t - symbols]]
    [keep(t) for t in kept]
    return sorted(found)
""",
            "single symbols must stay",
        ),
        ("{edit:keep(int(token))→found.add(int(token))}", "their merges are never reached"),
    ],
    12: [
        ("def fall(w, h, n):\n    return np.log(1 + n/len(w)) + 0*h[:, 0]", "Jensen"),
        ("{edit:np.exp(logits.mean(1))→1}", "rows of zeros"),
        ("{edit:n * np→1 * np}", "there are n of them"),
    ],
    13: [
        ("{edit:(1 - p) ** n→2.718281828459045 ** (-n * p)}", "1 − (1 − p)ⁿ"),
        ("def touched(counts, n):\n    return n", "twice"),
        ("def touched(counts, n):\n    v = len(counts)\n    return v*(1 - (1 - 1/v)**n)", "equally frequent"),
    ],
}


def solution(number):
    """Return the code of the printed solution."""
    (code,) = re.findall(r"```python\n(.*?)```", EXERCISES[number].text()[3], re.S)
    return code


def write_answer(folder, number, text):
    """Write the file of a reader: the import of numpy, then the text or the edited solution."""
    if edit := re.fullmatch(r"\{edit:(.*)→(.*)\}", text, re.S):
        assert edit[1] in solution(number)
        text = solution(number).replace(edit[1], edit[2])
    path = folder / f"answer{number}.py"
    path.write_text(f"import numpy as np\n{text}")
    return path


def test_every_exercise_has_text_and_tested_answers():
    assert sorted(EXERCISES) == sorted(RIGHT) == sorted(WRONG) == list(range(1, 14))
    assert all(len(RIGHT[n]) == len(WRONG[n]) == len(EXERCISES[n].mistakes or WRONG[n]) == 3 or n == 7 for n in RIGHT)
    titles = {EXERCISES[n].text()[0] for n in EXERCISES}
    assert len(titles) == 13
    assert all(all(EXERCISES[n].text()) for n in EXERCISES)


@pytest.mark.slow
@pytest.mark.parametrize("number", EXERCISES)
def test_checker_accepts_right_answers_and_explains_three_mistakes(tmp_path, number):
    seconds = 600  # the machine may be busy
    for text in (solution(number), *RIGHT[number]):
        assert find_fault(number, write_answer(tmp_path, number, text), seconds) is None, text
    for text, says in WRONG[number]:
        wrong = find_fault(number, write_answer(tmp_path, number, text), seconds)
        assert wrong is not None
        assert says in wrong, wrong


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def saved(v, d, layers)\n    return 1", "SyntaxError in line 2"),
        ("x = 1", "defines no function saved"),
        ("def saved(v, d, layers):\n    return v / 0", "ZeroDivisionError in line 3"),
        ("def saved(v, d, layers):\n    pass", "returns nothing"),
        ("import nothing_of_this_name", "needs nothing_of_this_name"),
        ("def saved(v, d, layers):\n    return bytearray(1 << 33)", "more than 1024 MB"),
        ("import torch\ndef saved(v, d, layers):\n    return torch.empty(1 << 33)", "more than 1024 MB"),
        ("def saved(v, d, layers):\n    raise SystemExit('gone')", "gone"),
    ],
)
def test_checker_names_reason_for_unusable_answer_file(tmp_path, text, says):
    with pytest.raises(RunError, match=says):
        find_fault(1, write_answer(tmp_path, 1, text))


def test_checker_stops_endless_loop(tmp_path):
    with pytest.raises(RunError, match=r"answer1\.py took more than 1 s; look for a loop"):
        find_fault(1, write_answer(tmp_path, 1, "while True: pass"), seconds=1)


def test_checker_reports_position_or_shape_of_other_mistakes(tmp_path):
    print_first = "print('words of its own')\n"
    wrong = find_fault(1, write_answer(tmp_path, 1, print_first + "def saved(v, d, layers):\n    return v*d, 7"))
    assert wrong == "saved(32000, 1024, 12): it is 7 at (1,), and should be 0.151332"
    wrong = find_fault(1, write_answer(tmp_path, 1, "def saved(v, d, layers):\n    return v*d"))
    assert wrong == "saved(32000, 1024, 12): it returned one number; return 2 numbers"


def test_exercise_command_lists_prints_and_checks_exercises(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(command_line(["exercise"]), ["exercise", *map(str, arguments)])

    assert "13  How many rows" in run().output
    assert "saved(v, d, layers)" in run(1).output
    assert "Write down the untied" not in run(1).output
    assert "Write down the untied" in run(1, "--hint").output
    right = write_answer(tmp_path, 1, solution(1))
    assert (run(1, right).exit_code, run(1, right).output) == (0, "right\n")
    assert run(4, write_answer(tmp_path, 4, WRONG[4][0][0])).exit_code == 1
    with pytest.raises(RunError, match="no exercise 99; choose 1 to 13"):
        find_fault(99, right)
    with pytest.raises(RunError, match="no file"):
        find_fault(1, tmp_path / "none.py")
    assert isinstance(run(99).exception, RunError)


def test_answer_to_exercise_13_matches_sampled_count():
    draws = np.random.default_rng(0).choice(3, p=[0.5, 0.3, 0.2], size=(200_000, 4))
    mean = np.mean([(draws == token).any(1) for token in range(3)], 1).sum()
    assert EXERCISES[13].answer(np.array([5, 3, 2]), 4) == pytest.approx(mean, abs=5e-3)


def test_exercises_page_equals_generated_page():
    root = Path(__file__).parents[2]
    page = runpy.run_path(str(root / "tools" / "make_exercises.py"))["page"]()
    committed = (root / "docs" / "reference-exercises.md").read_text(encoding="utf-8")
    assert committed == page, "run python tools/make_exercises.py"
