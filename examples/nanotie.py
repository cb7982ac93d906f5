"""nanotie: the whole idea of tiewise in one file of plain PyTorch.

A language model touches its vocabulary twice. The input embedding turns a token into a vector,
the output head turns a vector into one score for every token. Each has a table with one row per
token, and in a small model these two are most of the parameters. Should they be one table?
This file builds five answers, trains them and decides. It is also the tests' oracle.

    python examples/nanotie.py                       a minute on two cores: verdict, then table
    python examples/nanotie.py book.txt --seeds 8    your text, and more evidence
    python examples/nanotie.py page.txt --steps 250  little text, read often: shows decision 9
    python examples/nanotie.py --arms untied,tied,factored:16,projected:32,residual:8

Design decisions

 1. A table is [V, E] at both ends, one row per token. The head multiplies by its transpose.
 2. Tied means one Parameter under two names, not two equal copies.
 3. The boundary owns tables and maps; the body (attention, MLP) never sees a token id.
 4. The [N, V] logits never exist. A chunk's logits become gradients at once, in the forward pass.
 5. A tied table receives two gradients in one [V, E] buffer. The head writes first, the lookup
    adds its few rows in place. The autograd graph alone fixes this order.
 6. The loss sums in fp32 (fp64 for fp64 inputs) and never changes its inputs. A batch in which
    every label is ignored has loss 0 and gradient 0, not nan.
 7. Tables start as N(0, 1/D), so that the first loss is near ln V, the loss of a uniform guess.
 8. Seeds are pairs: all arms of a seed get the same batches, and bodies with the same numbers.
 9. Every run is measured at its best step and after its last. On a small text, two tables overfit
    sooner than one. If tied is ahead after the last step only, untied was trained for too long.
10. An interval decides, not a mean. If it contains zero, the verdict is "undecided", which is not
    "no difference"; the verdict then states the size of an effect that is likely to be missed.

Counterparts in the library

    parse_spec                  tiewise.core.spec.BoundarySpec: also spd, factored-untied, +options
    Boundary                    tiewise.Boundary
    linear_cross_entropy        tiewise.linear_cross_entropy: also soft-cap, smoothing, fast kernels
    tied_lookup, path_norms     tiewise.boundary.tied_lookup, tiewise.boundary.path_norms
    asymmetry                   tiewise.inspect, section "direct path"
    LanguageModel               tiewise.install puts a boundary into any Hugging Face model
    train, compare, verdict     tiewise.train, tiewise.compare
    paired_interval             tiewise.training.results.paired
    not in this file            tiewise.plan for sizes; tiewise.check, tiewise.repair for checkpoints
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

# Letters: B batch, T time, N = B·T tokens, V vocabulary, D width of the body, E width of a table.
WIDTH, LAYERS, HEADS, LENGTH = 64, 2, 4, 64  # sizes of the decoder; LENGTH is T
VOCAB, UNKNOWN = 2048, 0  # words that have a row, and the row of all other words
BATCH, LEARNING_RATE = 16, 4e-3  # windows of LENGTH tokens in a step; the rate's maximum
MEASUREMENTS, MEASURED_WINDOWS = 6, 64  # measurements of a run (about), and windows of each
IGNORED = -100  # label of a position that does not count, as in torch.nn.functional.cross_entropy
LOGITS_AT_ONCE = 2**20  # entries of a chunk's logits: 4 MB in fp32, about a processor's cache


# ---- The boundary: five ways to touch the vocabulary -------------------------------------------
#     embed(ids)     = in_map(table_in[ids])           [...]    -> [..., D]
#     logits(hidden) = out_map(hidden) @ table_out.T   [..., D] -> [..., V]
#
#     kind         tables      in_map   out_map     parameters     at GPT-2's V = 50,257, D = 768
#     untied       two [V, D]  -        -           2·V·D          77.2 million
#     tied         one [V, D]  -        -           V·D            38.6 million, half is saved
#     factored:k   one [V, k]  k -> D   D -> k      V·k + 2·k·D     6.6 million for k = 128
#     projected:E  one [V, E]  E -> D   D -> E      V·E + 2·E·D    15.5 million for E = 300
#     residual:r   one [V, D]  -        I + s·P·Q   V·D + 2·r·D    38.6 million for r = 32
#
#     factored: ALBERT, k < D. projected: Press & Wolf 2017, any E; no in_map if E = D, otherwise
#     the same modules as factored.

KINDS = ("untied", "tied", "factored", "projected", "residual")


def parse_spec(spec: str, width: int) -> tuple[str, int]:
    """Split a spec such as "factored:16" into kind and size, or raise a ValueError."""
    kind, colon, size = spec.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown boundary {spec!r}; choose from {', '.join(KINDS)}")
    if not colon and kind in ("untied", "tied", "projected"):
        return kind, width
    if kind in ("untied", "tied"):
        raise ValueError(f"{kind} takes no size; write {kind}")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"{kind} needs a size of 1 or more; write {kind}:16, for example")
    if kind == "factored" and int(size) > width:
        raise ValueError(f"{spec} is wider than the body, {width}; write projected:{size}")
    return kind, int(size)


class Boundary(nn.Module):
    """Tables and maps between token ids and a body of width D."""

    def __init__(self, spec: str, vocab: int, width: int) -> None:
        super().__init__()
        kind, size = parse_spec(spec, width)
        table_width = size if kind in ("factored", "projected") else width
        self.tied = kind != "untied"
        self.table_in = new_table(vocab, table_width, width)
        # Why the same object, and not a second table with equal values? A copy is equal until the
        # first optimizer step: one copy would get the lookup's gradient, the other the head's.
        # One Parameter gets their sum, has one pair of Adam moments, and is listed once by
        # parameters(). The state dict has both names. This line is where tying saves V·D parameters.
        self.table_out = self.table_in if self.tied else new_table(vocab, width, width)
        self.in_map, self.out_map = nn.Identity(), nn.Identity()
        if kind == "factored" or (kind == "projected" and table_width != width):
            self.in_map = linear_map(table_width, width)  # E·D parameters
        if kind in ("factored", "projected"):
            self.out_map = linear_map(width, table_width)  # E·D more parameters
        if kind == "residual":
            self.out_map = LowRankCorrection(width, size)  # 2·r·D more parameters than tied
        self.record: list[tuple[Tensor, Tensor]] | None = None  # see path_norms

    def embed(self, ids: Tensor) -> Tensor:
        """Map token ids [...] to the body's input [..., D]."""
        return self.in_map(F.embedding(ids, self.table_in))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to all logits [..., V]; training never calls this."""
        return self.out_map(hidden) @ self.table_out.T

    def forward(self, ids: Tensor, body: nn.Module, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets`, in nats per token, with `body` in the middle."""
        # The lookup returns the table as a second output, and the head uses that. So the head's
        # gradient of the table arrives at the lookup's backward, finished, for it to add to.
        rows, table = tied_lookup(self.table_in, ids, self.record)
        hidden = self.out_map(body(self.in_map(rows)))
        return linear_cross_entropy(hidden, table if self.tied else self.table_out, targets)


def new_table(vocab: int, table_width: int, width: int) -> nn.Parameter:
    """Return a table [V, E] with entries from N(0, 1/D)."""
    # Why 1/D? The body ends in a norm, so a hidden state has length √D. Its product with a row of
    # N(0, 1/D) entries is N(0, 1), and log Σ exp of V such logits is about ln V + 1/2. With N(0, 1)
    # entries, the default of nn.Embedding, a tied model starts near a loss of D: its hidden state
    # still resembles the row that it was looked up from, and that row's logit is near D.
    return nn.Parameter(torch.randn(vocab, table_width) * width**-0.5)


def linear_map(inputs: int, outputs: int) -> nn.Linear:
    """Return a map without bias that keeps the mean square of its input."""
    module = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(module.weight, std=inputs**-0.5)
    return module


class LowRankCorrection(nn.Module):
    """The map x + s·P·Q·x of rank r. P [D, r] starts at zero, so training starts tied."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(width, rank))
        self.q = nn.Parameter(torch.randn(rank, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return x + 0.03 * (x @ self.q.T @ self.p.T)  # s = 0.03, the library's default


@torch.no_grad()
def asymmetry(boundary: Boundary, ids: Tensor) -> float:
    """Return ‖M − Mᵀ‖ / ‖M‖ of the direct path M between the tokens `ids`."""
    # M[a, b] is the logit of token b after token a if the body passes its input through. Why is M
    # symmetric when tied? Without maps M = W_E · W_Uᵀ. If both are one table, M[a, b] is the product
    # of rows a and b, equal for (a, b) and (b, a): "New York" scores as high as "York New", and the
    # body has to learn the order. Independent tables give √2. With an out_map, M is not symmetric.
    direct_path = boundary.logits(boundary.embed(ids))[:, ids]
    return ((direct_path - direct_path.T).norm() / direct_path.norm()).item()


# ---- The loss, without its logits --------------------------------------------------------------
# For 8,192 tokens and GPT-2's vocabulary the logits take 1.6 GB in fp32, their gradient as much
# again. But a mean over `count` tokens needs only
#     loss      = Σ (log Σ exp(logits) − logit of the target) / count
#     slope     = (softmax(logits) − onehot(target)) / count             d loss / d logits
#     d hidden  = slope @ table                                          [N, E]
#     d table   = slope.T @ hidden                                       [V, E]
# Loss and d table are sums over tokens; slope and d hidden have a row for each token. So chunks of
# tokens suffice, with the three matrix products of the plain loss: logits, d hidden and d table.


def linear_cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Return the mean cross-entropy of `hidden @ table.T`, `chunk` tokens at a time.

    Shapes are hidden [..., E], table [V, E] and targets [...], which are token ids or IGNORED.
    """
    chunk = chunk or max(1, LOGITS_AT_ONCE // len(table))
    flat = hidden.reshape(-1, hidden.shape[-1])
    training = torch.is_grad_enabled()  # always False inside forward() below
    return FusedCrossEntropy.apply(flat, table, targets.reshape(-1), chunk, training)


class FusedCrossEntropy(torch.autograd.Function):
    """A loss whose forward pass computes the gradients, too; the backward pass scales them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, table: Tensor, targets: Tensor, chunk: int, training: bool):
        """Return the loss [], and keep the gradients of `hidden` and `table` if `training`."""
        wide = torch.promote_types(hidden.dtype, torch.float32)  # bf16 and fp16 are summed in fp32
        wide_table = table.to(wide)  # an fp32 table is not copied; the library copies no table
        counted = targets != IGNORED
        count = counted.sum().clamp(min=1)  # if no label counts, the loss is 0 / 1, not 0 / 0
        targets = targets.where(counted, 0)  # any valid row, since its weight is 0
        loss = wide_table.new_zeros(())
        hidden_grad, table_grad = torch.zeros_like(hidden, dtype=wide), torch.zeros_like(wide_table)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            states, target = hidden[part].to(wide), targets[part, None]
            weight = counted[part].to(wide) / count  # each token's share of the mean; 0 if ignored
            logits = states @ wide_table.T  # [chunk, V], the only logits in training
            log_sum = logits.logsumexp(1, keepdim=True)
            loss += (weight * (log_sum - logits.gather(1, target)).squeeze(1)).sum()
            if training:
                slope = logits.sub_(log_sum).exp_()  # softmax, in the memory of the logits
                slope.scatter_add_(1, target, -torch.ones_like(log_sum))  # minus the one-hot target
                slope.mul_(weight[:, None])  # rows of ignored labels become 0
                hidden_grad[part] = slope @ wide_table
                table_grad.addmm_(slope.T, states)  # every chunk adds to the same [V, E] buffer
        ctx.gradients, ctx.dtypes = (hidden_grad, table_grad), (hidden.dtype, table.dtype)
        return loss

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale both gradients by `upstream`, the derivative of the final value by the loss."""
        # Why were they not computed here, where gradients belong? Because the logits would have to
        # be stored between the passes. The price: autograd takes the buffers, so this works only once.
        if ctx.gradients is None:
            raise RuntimeError("this loss was already differentiated; compute it again")
        gradients, ctx.gradients = ctx.gradients, None
        # A scaler's upstream lifts what fp16 would round to zero, so scale first and round then.
        scaled = [grad.mul_(upstream).to(dtype) for grad, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None


# ---- The two gradient paths of a tied table ----------------------------------------------------
#     lookup path   a row gets the gradient of every position where its token is read
#     head path     a row is multiplied by every hidden state, and gets a gradient from each
# The table's gradient is their sum, by the chain rule. Plain autograd makes a [V, E] tensor for
# each. But the lookup path is zero in all rows that were not read, and the head path in none.


def tied_lookup(table: Tensor, ids: Tensor, record: list | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of `ids` [..., E], and the table that the head has to use.

    With a `record`, a backward pass appends (ids, gradient rows) of the lookup path to it.
    """
    return TiedLookup.apply(table, ids, record)


class TiedLookup(torch.autograd.Function):
    """A lookup through which the table passes on its way to the head."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, record: list | None) -> tuple[Tensor, Tensor]:
        """Return rows and a view of the table."""
        ctx.set_materialize_grads(False)  # an unused output has the gradient None
        ctx.save_for_backward(ids)
        ctx.table_shape, ctx.record = table.shape, record
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    def backward(ctx, rows_grad: Tensor | None, table_grad: Tensor | None):
        """Add the lookup path to the head path, in the head path's own buffer."""
        # Why may this change its argument? Both outputs come from this node, so autograd calls it
        # once, after all that used either output. Then `table_grad` is complete. It is the buffer
        # that the loss gave to autograd, and nothing else refers to it.
        if rows_grad is None:  # a body that ignores its input
            return table_grad, None, None
        if table_grad is None:  # untied: the head has another table
            table_grad = rows_grad.new_zeros(ctx.table_shape)
        ids = ctx.saved_tensors[0].reshape(-1)
        rows = rows_grad.reshape(len(ids), -1)
        if ctx.record is not None:
            ctx.record.append((ids, rows))
        table_grad.index_add_(0, ids, rows)  # a token that occurs twice is added twice
        return table_grad, None, None


@dataclass(frozen=True)
class PathNorms:
    """Norms of both gradient paths and of their sum, and the cosine between the paths."""

    lookup: float
    head: float
    total: float
    cosine: float  # nan for two tables, whose gradients are never added, and if a path is zero


def path_norms(boundary: Boundary) -> PathNorms:
    """Measure both paths, after backward() and before gradients are clipped or cleared.

    If tied, set `boundary.record = []` before the forward pass: a sum does not show its parts.
    """
    if not boundary.tied:
        lookup, head = (t.grad.norm().item() for t in (boundary.table_in, boundary.table_out))
        return PathNorms(lookup, head, math.hypot(lookup, head), math.nan)
    if boundary.record is None:
        raise ValueError("the lookup path was not recorded; set boundary.record = [] before the forward pass")
    total = boundary.table_in.grad
    lookup_path = torch.zeros_like(total)
    for ids, rows in boundary.record:
        lookup_path.index_add_(0, ids, rows)
    head_path = total - lookup_path
    lookup, head = lookup_path.norm().item(), head_path.norm().item()
    cosine = (lookup_path * head_path).sum().item() / (lookup * head) if lookup and head else math.nan
    return PathNorms(lookup, head, total.norm().item(), cosine)


# ---- The body: a small decoder -----------------------------------------------------------------
class Block(nn.Module):
    """Causal attention and an MLP. Each reads a normalised stream, and adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, D / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Positions, blocks and a last norm: vectors to vectors, without a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map embedded tokens [B, T, D] to hidden states [B, T, D]."""
        return self.norm(self.blocks(x + self.positions[: x.shape[1]]))


class LanguageModel(nn.Module):
    """A decoder inside a boundary."""

    def __init__(self, spec: str, vocab: int, seed: int) -> None:
        super().__init__()
        # Why the body first? Arms draw different numbers of values for their tables. Drawn first,
        # these would leave every arm of a seed with another body.
        torch.manual_seed(seed)
        self.body = Decoder()
        self.boundary = Boundary(spec, vocab, WIDTH)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets` [B, T]."""
        return self.boundary(ids, self.body, targets)


# ---- Training on a text ------------------------------------------------------------------------
@dataclass(frozen=True)
class Corpus:
    """Token ids of the three parts of a text, each [tokens], and the vocabulary's size."""

    train: Tensor
    tuning: Tensor  # chooses the best step
    heldout: Tensor  # measures it. A best step chosen here would make the loss look too low
    vocab: int


def make_corpus(text: str) -> Corpus:
    """Number a text's words, and split them 90 : 5 : 5, the end held out."""
    # A paragraph counts once: if the end repeated one, a model could recite it.
    paragraphs = dict.fromkeys(paragraph.strip() for paragraph in text.split("\n\n"))
    words = re.findall(r"\w+|[^\w\s]|\n", "\n\n".join(paragraphs))
    if len(words) < 20 * (LENGTH + 1):  # a twentieth must contain a window
        raise ValueError(f"the text has only {len(words)} words; give one of {20 * (LENGTH + 1)} or more")
    train_end, tuning_end = len(words) * 90 // 100, len(words) * 95 // 100
    frequent = Counter(words[:train_end]).most_common(VOCAB - 1)  # held-out words do not count
    number = {word: row for row, (word, _) in enumerate(frequent, start=UNKNOWN + 1)}
    ids = torch.tensor([number.get(word, UNKNOWN) for word in words])
    return Corpus(ids[:train_end], ids[train_end:tuning_end], ids[tuning_end:], len(number) + 1)


def windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [B, T] of the windows that begin at `starts` [B]."""
    block = tokens[starts[:, None] + torch.arange(LENGTH + 1)]
    targets = block[:, 1:]  # UNKNOWN is no word to predict, so it is ignored
    return block[:, :-1], targets.masked_fill(targets == UNKNOWN, IGNORED)


def batches(tokens: Tensor, seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of `steps` batches, the same for every arm with this seed."""
    order = torch.Generator().manual_seed(seed)  # a separate generator: models draw from another
    starts = torch.randint(len(tokens) - LENGTH, (steps, BATCH), generator=order)
    return [windows(tokens, of_batch) for of_batch in starts]


@torch.no_grad()
def loss_on(tokens: Tensor, model: LanguageModel) -> float:
    """Return the mean loss over windows spread evenly over `tokens`."""
    last = len(tokens) - LENGTH - 1
    starts = torch.linspace(0, last, min(MEASURED_WINDOWS, last // LENGTH + 1)).long()
    return model(*windows(tokens, starts)).item()


@dataclass
class Run:
    """Results of one arm with one seed; losses are means in nats per token."""

    parameters: int
    curve: list[float] = field(default_factory=list)  # training loss before each step's update
    best_step: int = 0
    best_tuning: float = math.inf
    best_loss: float = math.nan  # on the held-out text at the best step
    last_loss: float = math.nan  # on the held-out text, after the last step
    paths: PathNorms | None = None  # gradients of the last step
    asymmetry: float = math.nan  # of the 500 most frequent words, after the last step

    def measure(self, step: int, model: LanguageModel, corpus: Corpus) -> None:
        """Measure the model after `step` updates, and record the best step."""
        tuning, self.last_loss = loss_on(corpus.tuning, model), loss_on(corpus.heldout, model)
        if tuning < self.best_tuning:
            self.best_step, self.best_tuning, self.best_loss = step, tuning, self.last_loss


def train(spec: str, corpus: Corpus, seed: int, steps: int) -> Run:
    """Train one arm with one seed."""
    model = LanguageModel(spec, corpus.vocab, seed)
    run = Run(parameters=sum(parameter.numel() for parameter in model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warm_up = max(1, steps // 10)  # the rate rises for a tenth of the steps, then falls to 0
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm_up) * (1 - step / steps))
    for step, (ids, targets) in enumerate(batches(corpus.train, seed, steps)):
        if step % max(1, steps // MEASUREMENTS) == 0:
            run.measure(step, model, corpus)
        model.boundary.record = [] if step == steps - 1 else None
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.curve.append(loss.item())
    run.measure(steps, model, corpus)
    run.paths = path_norms(model.boundary)  # gradients of the last step
    run.asymmetry = asymmetry(model.boundary, torch.arange(1, min(501, corpus.vocab)))
    return run


def compare(arms: list[str], corpus: Corpus, seeds: int, steps: int) -> dict[str, list[Run]]:
    """Train all arms with all seeds. Runs at the same place of two lists are a pair."""
    runs: dict[str, list[Run]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        for arm in arms:
            runs[arm].append(train(arm, corpus, seed, steps))
            print(f"seed {seed}, {arm}: {runs[arm][-1].last_loss:.3f} nats/token", file=sys.stderr)
    return runs


# ---- The verdict -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Interval:
    """Mean of paired differences, and its interval [low, high]."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def paired_interval(differences: list[float], error_rate: float = 0.05) -> Interval:
    """Return the mean of differences with Student's interval, mean ± t·s/√n."""
    # Why differences of pairs, and not two means with an error bar each? Easy batches are easy for
    # both arms of a seed. What they share cancels in the difference, and need not be averaged out.
    # The interval is over seeds. Another held-out text would move the mean further than it says.
    values = torch.tensor(differences, dtype=torch.float64)
    center, standard_error = values.mean().item(), values.std().item() / math.sqrt(len(values))
    half_width = student_quantile(len(values) - 1, error_rate) * standard_error
    return Interval(center, center - half_width, center + half_width)


def student_quantile(freedom: int, error_rate: float) -> float:
    """Return t with P(|T| > t) = `error_rate`, T with n - 1 degrees of freedom."""
    # Why not 1.96? Because s comes from the same few values: t is 2.78 for five pairs, 12.7 for two.
    # With T = √freedom · tan(angle), the angle has the density cos^(freedom - 1), up to a constant.
    # Its running sum reaches 1 - error_rate at the angle to return.
    angle = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angle.cos() ** (freedom - 1), angle)  # up to angle[1], ...
    covered = (1 - error_rate) * mass[-1]
    after = int(torch.searchsorted(mass, covered))
    part = (covered - mass[after - 1]) / (mass[after] - mass[after - 1])
    return math.sqrt(freedom) * math.tan(angle[after] + part * angle[1])


def difference(runs: dict[str, list[Run]], arm: str, moment: str) -> Interval:
    """Return `arm` minus the first arm, at the moment "best_loss" or "last_loss"."""
    reference, *others = runs
    pairs = zip(runs[arm], runs[reference], strict=True)
    # Three arms have two chances to differ by luck. Each gets its share of the 5 % (Bonferroni), so
    # that all intervals hold together in 95 % of cases. The library uses Holm, which loses less.
    differences = [getattr(run, moment) - getattr(base, moment) for run, base in pairs]
    return paired_interval(differences, 0.05 / len(others))


def verdict(runs: dict[str, list[Run]], arm: str) -> str:
    """Say whether `arm` or the first arm is better, or that it is undecided."""
    reference, seeds = next(iter(runs)), len(runs[arm])
    best = difference(runs, arm, "best_loss")
    if best.low <= 0 <= best.high:
        return (
            f"Undecided: the 95 % interval of {arm} - {reference}, {best.low:+.3f} to {best.high:+.3f} "
            f"nats/token with {seeds} seeds, contains zero.\n"
            f'This is not "no difference": {seeds} seeds are likely to miss an effect of less than '
            f"{(best.high - best.low) / 2:.3f} nats/token, half the interval's width."
        )
    better, worse = (reference, arm) if best.mean > 0 else (arm, reference)
    least, most = sorted((abs(best.low), abs(best.high)))
    change = runs[better][0].parameters / runs[worse][0].parameters - 1
    return (
        f"{better} wins on this text: its held-out loss is {abs(best.mean):.3f} nats/token lower than "
        f"that of {worse} (95 % interval {least:.3f} to {most:.3f}, {seeds} seeds), "
        f"with {100 * abs(change):.0f} % {'more' if change > 0 else 'fewer'} parameters."
    )


def table_of(runs: dict[str, list[Run]]) -> str:
    """Return a table of the means over seeds, a row for each arm."""
    lines = ["           arm parameters first loss best step best loss last loss head path cosine asymmetry"]
    for arm, of_arm in runs.items():
        head_share = mean(run.paths.head / (run.paths.head + run.paths.lookup) for run in of_arm)
        lines.append(
            f"{arm:>14} {of_arm[0].parameters:10,} {mean(run.curve[0] for run in of_arm):10.3f} "
            f"{mean(run.best_step for run in of_arm):9.0f} {mean(run.best_loss for run in of_arm):9.3f} "
            f"{mean(run.last_loss for run in of_arm):9.3f} {head_share:9.2f} "
            f"{mean(run.paths.cosine for run in of_arm):6.2f} {mean(run.asymmetry for run in of_arm):9.2f}"
        )
    return "\n".join(lines)


# ---- The command -------------------------------------------------------------------------------
def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Corpus]:
    """Read the command line and the text; anything wrong ends the program with one line."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description="Tied or untied?")
    parser.add_argument("text", nargs="?", help="a text file; default: Python's own manual")
    parser.add_argument("--arms", default="untied,tied", help="boundaries; the first is compared with")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs, 2 or more")
    parser.add_argument("--steps", type=int, default=100, help="batches of each run, 1 or more")
    arguments = parser.parse_args(argv)
    arguments.arms = list(dict.fromkeys(arguments.arms.split(",")))
    if len(arguments.arms) < 2 or arguments.seeds < 2 or arguments.steps < 1:
        parser.error("give at least two different arms, 2 seeds and 1 step")
    try:
        for arm in arguments.arms:
            parse_spec(arm, WIDTH)
        return arguments, make_corpus(read_text(arguments.text))
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))


def read_text(path: str | None) -> str:
    """Return the text of a file, or the language reference that every Python carries."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def main(argv: list[str] | None = None) -> None:
    """Compare arms; print the verdict first, then its evidence."""
    arguments, corpus = parse_arguments(argv)
    runs = compare(arguments.arms, corpus, arguments.seeds, arguments.steps)
    reference, *others = arguments.arms
    print("\n".join(verdict(runs, arm) for arm in others), table_of(runs), sep="\n\n", end="\n\n")
    for arm in others:
        best, last = difference(runs, arm, "best_loss"), difference(runs, arm, "last_loss")
        print(f"{arm} - {reference}: {best} at the best step, which decides; {last} after the last step")
    print(f"Losses: nats/token; a uniform guess has {math.log(corpus.vocab):.3f}. The 95 % hold for all arms together.")
    print("Head path: share of both paths' norms. Cosine: between the paths. Asymmetry: of the direct path.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
