"""Every public function of the objective against its paper's formula, written down once more in plain Python.

The references know numbers only: a row is the list of its sampled tokens, so masks, padding, shapes and types can't matter to
them. Inputs are chosen to hurt: ratios on and around every bound, log-ratios of 1e4 and infinity, engines that gave no logprob,
rows and batches without tokens, NaN and infinity wherever nothing may look.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner import corrections, entropy, kl, losses, preference

Row = list[tuple[float, float, float]]  # (logprob, old logprob, advantage) of each sampled token
Expected = tuple[list[float], list[float], list[bool]]  # loss, its gradient (of their sum), clipped

INFINITY = math.inf
DEFAULT = {"clip_low": 0.2, "clip_high": 0.28}
BOUNDS = [0.0, math.log(0.8), math.log(1.28), math.log(3), -0.4, 0.4, math.log(5), math.log(0.5), math.log(2)]


def ratio(new: float, old: float) -> tuple[float, float, float]:
    """log r, r, and d r / d logprob; 1 where old is not known."""
    if math.isnan(old):
        old = new
    d = new - old
    held = min(max(d, -20.0), 20.0)
    return held, math.exp(held), math.exp(held) if held == d else 0.0


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def clip(r: float, a: float, low: float, high: float) -> tuple[float, bool]:
    """min(r A, clip(r) A) / A, and whether the clipped side is the smaller one."""
    held = min(max(r, 1 - low), 1 + high)
    return (held, True) if held * sign(a) < r * sign(a) else (r, False)


def ppo_clip(row: Row, *, dual_clip: float | None = None) -> Expected:
    out: Expected = ([], [], [])
    for new, old, a in row:
        _, r, slope = ratio(new, old)
        used, clipped = clip(r, a, 0.2, 0.28)
        if dual_clip is not None and a < 0 and used > dual_clip:
            used, clipped = dual_clip, True
        out[0].append(-used * a)
        out[1].append(0.0 if clipped else -slope * a)
        out[2].append(clipped)
    return out


def reinforce(row: Row) -> Expected:
    return [-a * new for new, _, a in row], [-a for *_, a in row], [False for _ in row]


def cispo(row: Row) -> Expected:
    weights = [min(ratio(new, old)[1], 5.0) for new, old, _ in row]
    return (
        [-w * a * new for w, (new, _, a) in zip(weights, row, strict=True)],
        [-w * a for w, (*_, a) in zip(weights, row, strict=True)],
        [ratio(new, old)[1] > 5.0 for new, old, _ in row],
    )


def sapo(row: Row) -> Expected:
    out: Expected = ([], [], [])
    for new, old, a in row:
        _, r, slope = ratio(new, old)
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-min(tau * (r - 1), 700.0)))
        out[0].append(-4 / tau * gate * a)
        out[1].append(-4 * gate * (1 - gate) * a * slope)
        out[2].append(False)
    return out


def gspo(row: Row, *, times_length: bool = False) -> Expected:
    if not row:
        return [], [], []
    n, a = len(row), sum(a for *_, a in row) / len(row)
    s = math.exp(sum(ratio(new, old)[0] for new, old, _ in row) / n)
    used, clipped = clip(s, a, 3e-4, 4e-4)
    scale = n if times_length else 1
    free = [not math.isnan(old) and abs(new - old) > 20 for new, old, _ in row]
    slope = 0.0 if clipped else -s * a * scale
    return [-used * a * scale] * n, [0.0 if at_bound else slope for at_bound in free], [clipped] * n


def luspo(row: Row) -> Expected:
    return gspo(row, times_length=True)


def gspo_token(row: Row) -> Expected:
    if not row:
        return [], [], []
    s = math.exp(sum(ratio(new, old)[0] for new, old, _ in row) / len(row))
    used = [clip(s, a, 3e-4, 4e-4) for *_, a in row]
    return (
        [-u * a for (u, _), (*_, a) in zip(used, row, strict=True)],
        [0.0 if clipped else -s * a for (_, clipped), (*_, a) in zip(used, row, strict=True)],
        [clipped for _, clipped in used],
    )


def gmpo(row: Row) -> Expected:
    if not row:
        return [], [], []
    n, a_row = len(row), sum(a for *_, a in row) / len(row)
    d = [ratio(new, old)[0] for new, old, _ in row]
    limited = [min(x, 0.4) if a > 0 else max(x, -0.4) if a < 0 else x for x, (*_, a) in zip(d, row, strict=True)]
    geometric = math.exp(sum(limited) / n)
    clipped = [x != y for x, y in zip(d, limited, strict=True)]
    held = [not math.isnan(old) and abs(new - old) > 20 for new, old, _ in row]
    slopes = [0.0 if c or h else -a_row * geometric for c, h in zip(clipped, held, strict=True)]
    return [-a_row * geometric] * n, slopes, clipped


def vespo(row: Row) -> Expected:
    total = sum(ratio(new, old)[0] for new, old, _ in row)
    w = math.exp(min(max(total, -20.0), 20.0))
    phi = []
    for *_, a in row:
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi.append(math.exp(max(k * math.log(w) + lam * (1 - w), -745.0)))
    return (
        [-p * a * new for p, (new, _, a) in zip(phi, row, strict=True)],
        [-p * a for p, (*_, a) in zip(phi, row, strict=True)],
        [False for _ in row],
    )


def bernoulli_kl(new: float, old: float) -> float:
    p, q, tiny = math.exp(new), math.exp(old), 1e-8
    return (q * (old - new) if q else 0.0) + (1 - q) * math.log((1 - q + tiny) / (1 - p + tiny))


def dppo(row: Row, moved: Callable[[float, float, float], bool]) -> Expected:
    out: Expected = ([], [], [])
    for new, old, a in row:
        w = min(ratio(new, old)[1], 20.0)
        dropped = a != 0 and moved(new, new if math.isnan(old) else old, a)
        out[0].append(0.0 if dropped else -w * a * new)
        out[1].append(0.0 if dropped else -w * a)
        out[2].append(dropped)
    return out


def dppo_tv(row: Row) -> Expected:
    return dppo(row, lambda new, old, a: (math.exp(new) - math.exp(old)) * sign(a) > 0.15)


def dppo_kl(row: Row) -> Expected:
    return dppo(row, lambda new, old, a: bernoulli_kl(new, old) > 0.05 and (new - old) * sign(a) > 0)


LOSSES: dict[str, tuple[Callable[..., Expected], dict[str, Any]]] = {
    "ppo_clip": (ppo_clip, {}),
    "two_sided_clip": (lambda row: ppo_clip(row, dual_clip=3.0), {"clip_low": 0.2, "clip_high": 0.28, "delta": 3.0}),
    "reinforce": (reinforce, {}),
    "cispo": (cispo, {}),
    "sapo": (sapo, {}),
    "gspo": (gspo, {}),
    "luspo": (luspo, {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": (gspo_token, {}),
    "gmpo": (gmpo, {}),
    "vespo": (vespo, {}),
    "dppo_tv": (dppo_tv, {}),
    "dppo_kl": (dppo_kl, {}),
}
ONE_ADVANTAGE_A_ROW = {"gspo", "luspo", "gmpo", "vespo"}

LOG_RATIOS = [*BOUNDS, 1e-9, -1e-9, 20.0, -20.0, 25.0, -25.0, 1e4, -1e4, INFINITY, math.nan]
LOGPROBS = [0.0, -1e-3, -0.7, -3.0, -40.0]
ADVANTAGES = [0.0, 1.0, -1.0, 1e6, -1e-9]
POISONS = [math.nan, INFINITY, -INFINITY, 1e30]
MASK_TYPES = [torch.bool, torch.int64, torch.float32, torch.uint8]

# Drawn as seeds: of lists of lists of floats hypothesis would spend more time on the drawing than the test on the formula.
seeds = given(seed=st.integers(0, 2**32))
few = settings(max_examples=12, deadline=None, derandomize=True)


def pair_of(larger: float, d: float) -> tuple[float, float]:
    """Two logprobs at that log-ratio, the larger one given; NaN: the engine gave none."""
    return (larger + d, larger) if d < 0 else (larger, larger - d)


class Grid:
    """A batch of up to five rows of up to six places as tensors, with poison where nothing was sampled, and as plain rows."""

    def __init__(self, seed: int, *, one_advantage_a_row: bool = False) -> None:
        self.draw = draw = random.Random(seed)
        rows, width = draw.randrange(6), draw.randrange(7)
        often = draw.choice([0.0, 0.5, 0.9, 1.0])
        self.mask = torch.tensor([[draw.random() < often for _ in range(width)] for _ in range(rows)], dtype=torch.bool)
        self.mask = self.mask.reshape(rows, width)
        self.rows: list[Row] = []
        for length in self.mask.sum(1).tolist():
            a = self.number(ADVANTAGES)
            pairs = [pair_of(draw.choice(LOGPROBS), self.number(LOG_RATIOS)) for _ in range(length)]
            self.rows.append([(*pair, a if one_advantage_a_row else self.number(ADVANTAGES)) for pair in pairs])
        # Columns of a wider tensor: nothing is contiguous.
        filled = torch.full((3, rows, width, 2), draw.choice(POISONS), dtype=torch.float64)
        filled[:, self.mask, 0] = (
            torch.tensor([t for row in self.rows for t in row], dtype=torch.float64).reshape(-1, 3).T
        )
        self.new, self.old, self.advantages = filled[..., 0].unbind(0)
        self.mask_given = self.mask.to(draw.choice(MASK_TYPES))

    def number(self, special: Sequence[float]) -> float:
        return self.draw.choice(special) if self.draw.random() < 0.5 else self.draw.uniform(-3, 3)

    def place(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> Tensor:
        placed = torch.zeros(self.mask.shape, dtype=dtype)
        placed[self.mask] = torch.tensor([v for row in values for v in row], dtype=dtype)
        return placed


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", losses.__all__)
@few
@seeds
def test_a_loss_is_its_formula(name: str, seed: int) -> None:
    grid = Grid(seed, one_advantage_a_row=name in ONE_ADVANTAGE_A_ROW)
    reference, options = LOSSES[name]
    given_ = [x.clone() for x in (grid.new, grid.old, grid.advantages, grid.mask_given)]
    new, old, a = (x.detach().requires_grad_() for x in (grid.new, grid.old, grid.advantages))
    terms = getattr(losses, name)(new, old, a, grid.mask_given, **options)
    wanted = [reference(row) for row in grid.rows]
    close(terms.token_loss.detach(), grid.place([of_row[0] for of_row in wanted]))
    assert torch.equal(terms.clipped, grid.place([of_row[2] for of_row in wanted], torch.bool))
    terms.token_loss.sum().backward()
    assert new.grad is not None
    close(new.grad, grid.place([of_row[1] for of_row in wanted]))
    assert old.grad is None
    assert a.grad is None
    for before, after in zip(given_, (new, old, a, grid.mask_given), strict=True):
        torch.testing.assert_close(before, after.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", losses.__all__)
def test_a_loss_of_short_numbers_is_that_of_float32(name: str) -> None:
    """exp(20) is infinite in float16, and in bfloat16 the means of a row have two digits."""
    for seed in range(20):
        grid = Grid(seed, one_advantage_a_row=name in ONE_ADVANTAGE_A_ROW)
        for dtype in (torch.float16, torch.bfloat16):
            results = []
            for wider in (dtype, torch.float32):
                # A logprob of -1e4 is no less than 1e4 in float16 too; what float16 can't hold is not the loss's fault.
                new, old, a = (x.to(dtype).to(wider) for x in (grid.new, grid.old, grid.advantages.clamp(-10, 10)))
                new.requires_grad_()
                terms = getattr(losses, name)(new, old, a, grid.mask_given)
                (terms.token_loss / 2e4).sum().backward()
                assert terms.token_loss.isfinite().all()
                assert new.grad is not None
                assert new.grad.isfinite().all()
                results.append((terms.token_loss.detach(), terms.clipped, new.grad.to(dtype)))
            for short, full in zip(*results, strict=True):
                assert torch.equal(short, full)


@pytest.mark.parametrize("name", losses.__all__)
def test_the_gradient_is_the_derivative_of_the_value(name: str) -> None:
    """Where the formula is smooth: by finite differences, away from bounds. A stopped gradient is none of the value's."""
    stopped = {"cispo", "vespo", "dppo_tv", "dppo_kl", "gspo_token"}
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    new = (old + 1e-5 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    a = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    if name not in stopped:
        method = getattr(losses, name)
        assert torch.autograd.gradcheck(lambda x: method(x, old, a, mask).token_loss, new, eps=1e-7, atol=1e-6)


# Off-policy corrections


def weights_of(name: str, row: Row) -> list[float]:
    """With the second number as the engine's logprob."""
    n = len(row)
    d = [ratio(old, behaviour)[0] for old, behaviour, _ in row]
    rho = [math.exp(x) for x in d]
    product = math.exp(min(max(sum(d), -20.0), 20.0))
    mean = sum(d) / max(n, 1)
    k3 = sum(math.expm1(x) - x for x in d) / max(n, 1)
    gap = [abs(math.exp(old) - math.exp(old if math.isnan(b) else b)) for old, b, _ in row]
    negative = sum(a for *_, a in row) < 0
    return {
        "untruncated": rho,
        "token_tis": [min(r, 2.0) for r in rho],
        "icepop": [r if 0.5 <= r <= 5 else 0.0 for r in rho],
        "token_mask": [r if 0.5 <= r <= 2 else 0.0 for r in rho],
        "sequence_tis": [min(product, 2.0)] * n,
        "sequence_mis": [product if product <= 2 else 0.0] * n,
        "sequence_mask": [product if 0.5 <= product <= 2 else 0.0] * n,
        "geometric_mask": [float(0.999 <= math.exp(mean) <= 1.001)] * n,
        "sequence_k3_mask": [float(k3 <= 0.01)] * n,
        "probability_gap_mask": [float(g <= 0.3) for g in gap],
        "negative_sequence_mask": [float(not (negative and -mean > 0.5))] * n,
    }[name]


@pytest.mark.parametrize("name", corrections.__all__)
@few
@seeds
def test_a_correction_is_its_formula(name: str, seed: int) -> None:
    grid = Grid(seed, one_advantage_a_row=True)
    old, behaviour = grid.new.detach().requires_grad_(), grid.old.detach().requires_grad_()
    data = {"advantages": grid.advantages} if name == "negative_sequence_mask" else {}
    weights = getattr(corrections, name)(old, behaviour, grid.mask_given, **data)
    close(weights, grid.place([weights_of(name, row) for row in grid.rows]))
    assert not weights.requires_grad
    for dtype in (torch.float16, torch.bfloat16):
        short = [x.detach().to(dtype) for x in (old, behaviour)]
        given_ = {key: value.to(dtype) for key, value in data.items()}
        in_short = getattr(corrections, name)(*short, grid.mask_given, **given_)
        in_full = getattr(corrections, name)(*(x.float() for x in short), grid.mask_given, **given_)
        assert torch.equal(in_short, in_full)
        assert in_short.isfinite().all()


def test_statistics_of_weights_without_any() -> None:
    """No token, no weight above 0, and weights whose squares no float32 holds."""
    nothing, some = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    bad = torch.full((2, 3), torch.nan)
    for weights, mask in ((nothing, some), (bad, nothing), (some[:0], some[:0])):
        assert corrections.effective_sample_size(weights, mask) == 0
        assert (corrections.batch_normalised(weights, mask) == 0).all()
    huge = torch.where(some > 0, 1e30, torch.nan)
    assert corrections.effective_sample_size(huge, some) == pytest.approx(3)
    torch.testing.assert_close(corrections.batch_normalised(huge, some), some)


def test_an_interpolated_policy_of_vanishing_probabilities() -> None:
    """exp(-200) is 0 in float32."""
    new, behaviour = torch.tensor([-200.0, -1e4, -1.0, 0.0]), torch.tensor([-201.0, -1e4, -torch.inf, -1.0])
    share = torch.tensor([0.5, 0.25, 0.5, 0.0])
    actual = corrections.interpolate_linear(new, behaviour, share)
    expected = [-200 + math.log((1 + math.exp(-1)) / 2), -1e4, -1 + math.log(0.5), -1.0]
    torch.testing.assert_close(actual, torch.tensor(expected))
    short = corrections.interpolate_loglinear(torch.tensor([-1.25]).bfloat16(), torch.tensor([-2.0]).bfloat16(), 0.3)
    torch.testing.assert_close(short, torch.tensor([-1.775]))
    impossible = torch.tensor([-torch.inf, -2.0]), torch.tensor([-2.0, -torch.inf]), torch.tensor([0.0, 1.0])
    for method in (corrections.interpolate_linear, corrections.interpolate_loglinear):
        assert method(*impossible).tolist() == [-2.0, -2.0]


def test_a_token_that_neither_policy_could_write_has_ratio_1() -> None:
    """-inf - -inf is no number, and an old policy of -inf alone is no ratio of e^20."""
    both, sampled = torch.tensor([[-torch.inf, -1.0]]), torch.ones(1, 2)
    for name in losses.__all__:
        new = both.clone().requires_grad_()
        for sign in (1.0, -1.0):
            terms = getattr(losses, name)(new, both, torch.tensor([[sign]]), sampled)
            assert terms.token_loss.isfinite().all()
            assert not terms.clipped.any()
            (slope,) = torch.autograd.grad(terms.token_loss.sum(), new)
            assert slope.isfinite().all()
    for name in corrections.__all__:
        data = {"advantages": -sampled} if name == "negative_sequence_mask" else {}
        assert (getattr(corrections, name)(both, both, sampled, **data) == 1).all()


def test_statistics_of_weights_hide_no_nan_and_no_shape() -> None:
    weights, sampled = torch.tensor([[1.0, torch.nan]]), torch.ones(1, 2)
    assert corrections.effective_sample_size(weights, sampled).isnan()
    assert corrections.batch_normalised(weights, sampled).isnan().all()
    for method in (corrections.effective_sample_size, corrections.batch_normalised):
        with pytest.raises(ValueError, match=r"weights \[1, 2\], response_mask \[2, 1\]"):
            method(weights, sampled.T)


def test_one_advantage_an_answer_is_not_spread_over_tokens() -> None:
    """[B] with B tokens: broadcast, each token would have the advantage of another answer."""
    square, answers = torch.zeros(2, 2), torch.tensor([1.0, -1.0])
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda a: losses.ppo_clip(square, square, a, square + 1).token_loss,
        lambda a: corrections.negative_sequence_mask(square - 1, square, square + 1, advantages=a),
        lambda a: kl.distillation_advantages(a, square - 1, square, square + 1),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"advantages must be \[B, T\] or \[B, 1\] as response_mask \[2, 2\], got \[2\]"
        ):
            call(answers)
        assert torch.equal(call(answers[:, None]), call(answers[:, None].expand(2, 2)))
    with pytest.raises(ValueError, match="returns"):
        losses.value_clip(square, square, answers, square + 1)


# Divergences


@few
@seeds
def test_kl_estimators_are_their_formulas(seed: int) -> None:
    grid = Grid(seed)
    rows = [(new, ref, a) for row in grid.rows for new, ref, a in row if math.isfinite(new - ref)]
    ref = torch.tensor([ref for _, ref, _ in rows], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([new - min(max(a, -3), 3) for new, _, a in rows], dtype=torch.float64, requires_grad=True)
    for name in kl.__all__:
        new = torch.tensor([new for new, *_ in rows], dtype=torch.float64, requires_grad=True)
        values = getattr(kl, name)(new, ref, **({"old_logprobs": old} if name == "k3_unbiased" else {}))
        values.sum().backward()
        expected, slopes = [], []
        for lp, at, before in zip(new.tolist(), ref.tolist(), old.tolist(), strict=True):
            d, r = lp - at, math.exp(lp - before)
            held = min(max(d, -20.0), 20.0)
            k3, slope = math.expm1(-held) + held, -math.expm1(-held)
            k3, slope = (10.0, 0.0) if k3 > 10 else (k3, slope)
            value, gradient = {
                "k1": (d, 1.0),
                "k2": (d * d / 2, d),
                "k3": (k3, slope),
                "k3_unbiased": (r * k3, r * (k3 + slope)),
            }[name]
            expected.append(value)
            slopes.append(gradient)
        close(values.detach(), torch.tensor(expected, dtype=torch.float64))
        assert new.grad is not None
        close(new.grad, torch.tensor(slopes, dtype=torch.float64))
    assert ref.grad is None
    assert old.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_d19_in_every_type(dtype: torch.dtype) -> None:
    """The reported overflow, in float16 already from d = -11 on."""
    for name in kl.__all__:
        new = torch.tensor([-100.0, -12.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
        ref = torch.tensor([0.0, 0.0, -100.0, -300.0], dtype=dtype)
        value = getattr(kl, name)(new, ref, **({"old_logprobs": ref} if name == "k3_unbiased" else {}))
        value.div(1e5).sum().backward()
        assert value.isfinite().all()
        assert new.grad is not None
        assert new.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_divergences_of_short_numbers_are_those_of_float32(dtype: torch.dtype) -> None:
    p, q = (torch.tensor(x).log().to(dtype) for x in ([0.5, 0.3, 0.2], [0.9, 0.05, 0.05]))
    for method in (kl.categorical_kl, kl.jensen_shannon):
        assert torch.equal(method(p, q), method(p.float(), q.float()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": 0.0}, "target must be > 0, got 0.0"),
        ({"target": -1.0}, "target must be > 0"),
        ({"horizon": 0}, "horizon must be >= 1, got 0"),
        (
            {"samples": 600},
            "samples must be >= 0 and <= 100, got 600",
        ),  # 0.1 * (1 - 0.2 * 6) is a reward for going astray
        ({"kl": math.nan}, "kl must be a number, got nan"),
    ],
)
def test_a_kl_controller_that_can_not_be(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kl.adaptive_coefficient(0.1, **{"kl": 0.0, "target": 0.1, "samples": 10, "horizon": 100} | changes)


def test_an_entropy_that_is_not_known_moves_no_coefficient() -> None:
    with pytest.raises(ValueError, match="entropy must be a number, got nan"):
        entropy.adaptive_coefficient(0.01, math.nan, target=0.2, step=0.001, maximum=0.05)


def test_penalties_of_another_shape_than_the_mask_are_refused() -> None:
    square = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"response_mask \[2, 1\]"):
        kl.reward_penalty(square, square, square[:, :1] + 1, coefficient=0.1)


def test_numbers_of_preference_losses_are_looked_at() -> None:
    pair = torch.zeros(1), torch.zeros(1)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="gamma must be a number"):
            preference.simpo(*pair, chosen_lengths=torch.ones(1), rejected_lengths=torch.ones(1), gamma=bad)
        with pytest.raises(ValueError, match="margin must be a number"):
            preference.bradley_terry(*pair, margin=bad)


def test_divergences_of_impossible_outcomes_have_a_gradient() -> None:
    """A masked vocabulary: -inf in the logits."""
    teacher = torch.tensor([0.25, 0.0, 0.5, 0.25]).log()
    of_logits: list[Callable[[Tensor], Tensor]] = [
        lambda logits: kl.categorical_kl(logits.log_softmax(0), teacher),
        lambda logits: kl.categorical_kl(teacher, logits.log_softmax(0)),
        lambda logits: kl.jensen_shannon(logits.log_softmax(0), teacher, share=0.3),
        entropy.categorical,
    ]
    for method in of_logits:
        logits = torch.tensor([1.0, -torch.inf, 0.5, -800.0], requires_grad=True)
        value = method(logits)
        value.backward()
        assert value.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        assert logits.grad[1] == 0
    p = torch.tensor([0.7, 0.0, 0.3]).log()
    assert kl.jensen_shannon(p, p).item() == pytest.approx(0, abs=1e-7)
    apart = kl.jensen_shannon(torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 1.0]).log())
    assert apart.item() == pytest.approx(math.log(2))
