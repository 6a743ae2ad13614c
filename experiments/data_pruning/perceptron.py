"""Pruned data for a perceptron with a teacher: the theory of the test error, and perceptrons that are trained.

python experiments/data_pruning/perceptron.py           # solve, train, draw
python experiments/data_pruning/perceptron.py --draw    # the figure and the table of results/perceptron.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import brentq, minimize_scalar, nnls
from scipy.stats import norm

HERE = Path(__file__).parent
FRACTIONS = (1.0, 0.6, 0.3, 0.1)
"""Shares of the examples that stay."""
ALPHAS = np.geomspace(1, 300, 30)
"""Examples before pruning, for each dimension, at which the theory is solved."""
SIZE, TRIALS = 100, 8
TRAINED = (1, 2, 4, 8, 16, 32)


def margins(order: str, fraction: float, nodes: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Return teacher margins |z| and their weights: a quadrature of a half normal that is cut at a quantile.

    Args:
      order: "hardest" keeps the smallest margins, "easiest" the largest, "random" all.
      fraction: the share that stays.
      nodes: number of nodes.
    """
    low, high = 0.0, 9.0
    if order == "hardest" and fraction < 1:
        high = norm.ppf((1 + fraction) / 2)
    if order == "easiest" and fraction < 1:
        low = norm.ppf(1 - fraction / 2)
    x, w = np.polynomial.legendre.leggauss(nodes)
    z = low + (high - low) * (x + 1) / 2
    weights = w * norm.pdf(z)
    return z, weights / weights.sum()


def error(alpha: float, order: str = "random", fraction: float = 1.0) -> float:
    """Return the test error of the perceptron of largest margin, in the limit of many dimensions.

    A perceptron of length 1 with overlap R with the teacher and margin k exists if, and only if,

        alpha E[(k - R |z| - sqrt(1 - R^2) t)_+^2] <= 1 - R^2,

    for a margin |z| of the teacher on the examples that stay and a standard normal t (Gardner's volume at its end, also
    by Gordon's comparison). The largest k for which some R satisfies it gives R, and the error is arccos(R) / pi. The
    same R and k solve the saddle-point equations of Sorscher et al. 2022, appendix A, for a probe that is the teacher.

    Args:
      alpha: examples that stay, for each dimension.
      order: see `margins`.
      fraction: see `margins`.
    """
    z, weights = margins(order, fraction)

    def excess(overlap: float, margin: float) -> float:
        b2 = 1 - overlap**2
        a, b = margin - overlap * z, np.sqrt(b2)
        squares = (a**2 + b2) * norm.cdf(a / b) + a * b * norm.pdf(a / b)
        return float(alpha * np.sum(weights * squares) - b2)

    def least(margin: float) -> tuple[float, float]:
        # in the angle, whose resolution does not vanish as the overlap nears 1
        angles = np.pi / 2 * np.geomspace(1e-6, 1, 60)
        values = [excess(np.cos(angle), margin) for angle in angles]
        n = int(np.argmin(values))
        bounds = (angles[max(n - 1, 0)], angles[min(n + 1, 59)])
        best = minimize_scalar(
            lambda angle: excess(np.cos(angle), margin), bounds=bounds, method="bounded", options={"xatol": 1e-10}
        )
        return best.fun, best.x

    top = 1.0
    while least(top)[0] < 0:
        top *= 2
    margin = brentq(lambda k: least(k)[0], 0.0, top, xtol=1e-10)
    return least(margin)[1] / np.pi


def trained_error(alpha: float, order: str, fraction: float, seed: int) -> float:
    """Return the exact test error of a perceptron of largest margin, trained on pruned examples.

    Args:
      alpha: examples before pruning, for each dimension.
      order: see `margins`.
      fraction: see `margins`.
      seed: of the examples.
    """
    draw = np.random.default_rng(seed)
    count = round(alpha * SIZE)
    x = draw.normal(size=(count, SIZE))
    z = x[:, 0]  # the teacher is the first axis
    by = {"hardest": np.abs(z), "easiest": -np.abs(z), "random": draw.random(count)}[order]
    stay = np.argsort(by)[: max(1, round(fraction * count))]
    signed = x[stay] * np.sign(z[stay])[:, None]
    # the shortest w with signed @ w >= 1, by non-negative least squares (Lawson & Hanson 1974, problem LDP)
    system = np.vstack([signed.T, np.ones(len(signed))])
    goal = np.append(np.zeros(SIZE), 1.0)
    solution, _ = nnls(system, goal, maxiter=100 * system.shape[1])
    residual = system @ solution - goal
    w = -residual[:SIZE] / residual[SIZE]
    return float(np.arccos(w[0] / np.linalg.norm(w)) / np.pi)


def front() -> list[tuple[float, float, float]]:
    """Return (examples that stay, the best share of the hardest, its error) for numbers of examples that stay."""
    points = []
    for alpha in np.geomspace(1, 40, 13):
        errors = {share: error(alpha, "hardest", share) for share in np.geomspace(0.003, 1, 22)}
        share = min(errors, key=lambda f: errors[f])
        points.append((float(alpha), float(share), errors[share]))
    return points


def measure() -> list[dict]:
    """Solve the theory and train perceptrons for every order and share."""
    rows = []
    for order in ("hardest", "easiest"):
        for fraction in FRACTIONS:
            if order == "easiest" and fraction == 1:
                continue
            theory = [error(fraction * a, order, fraction) for a in ALPHAS]
            points = []
            for a in TRAINED:
                some = [trained_error(a, order, fraction, seed) for seed in range(TRIALS)]
                points.append((a, float(np.mean(some)), float(np.std(some, ddof=1) / TRIALS**0.5)))
            rows.append(dict(order=order, fraction=fraction, theory=theory, trained=points))
            print(order, fraction, [round(p[1], 4) for p in points], flush=True)
    return rows


def draw(results: dict, path: Path) -> None:
    """Draw the test error over the number of examples that stay, a panel for each order."""
    rows = results["rows"]
    figure = Figure(figsize=(12, 4.4), dpi=110, layout="constrained")
    whole = next(row for row in rows if row["fraction"] == 1)
    for ax, order in zip(figure.subplots(1, 2, sharey=True), ("hardest", "easiest"), strict=True):
        for row in [whole, *(r for r in rows if r["order"] == order and r["fraction"] < 1)]:
            colour = dict(zip(FRACTIONS, ("#222222", "#3d6f96", "#d1495b", "#edae49"), strict=True))[row["fraction"]]
            ax.plot(row["fraction"] * ALPHAS, row["theory"], color=colour, label=f"{row['fraction']:.0%} stay")
            at, mean, spread = zip(*row["trained"], strict=True)
            ax.errorbar(row["fraction"] * np.array(at), mean, spread, fmt="o", color=colour, markersize=4)
        if order == "hardest":
            at, _, best = zip(*results["front"], strict=True)
            ax.plot(at, best, "--", color="#66a182", linewidth=2, label="the best share")
        ax.set(xscale="log", yscale="log", xlabel="examples that stay, for each dimension", title=f"the {order} stay")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
    figure.axes[0].set_ylabel("test error")
    figure.savefig(path)


def table(results: dict) -> None:
    """Print theory and training at each number of examples that was trained on."""
    rows = results["rows"]
    print(f"| | share | {' | '.join(f'{a} a dimension' for a in TRAINED)} |\n{'|---' * (2 + len(TRAINED))}|")
    for row in rows:
        cells = [
            f"{mean:.3f} ± {spread:.3f} ({error(row['fraction'] * a, row['order'], row['fraction']):.3f})"
            for a, mean, spread in row["trained"]
        ]
        name = "all" if row["fraction"] == 1 else row["order"]
        print(f"| {name} | {row['fraction']:g} | {' | '.join(cells)} |")
    print("\n| examples that stay, for each dimension | error of a random share | best share of the hardest | error |")
    print("|---" * 4 + "|")
    for alpha, share, best in results["front"][::3]:
        print(f"| {alpha:.1f} | {error(alpha):.2g} | {share:.3f} | {best:.2g} |")


def main() -> None:
    """Solve and train, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what is measured")
    file = HERE / "results/perceptron.json"
    if not parser.parse_args().draw:
        file.write_text(json.dumps({"rows": measure(), "front": front()}) + "\n")
    results = json.loads(file.read_text())
    draw(results, HERE / "results/perceptron.png")
    table(results)


if __name__ == "__main__":
    main()
