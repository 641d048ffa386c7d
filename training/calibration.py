"""Sequential temperature scaling (paper, section 3.2.1): confidences whose product means what it says.

The scheduler multiplies confidences to `a_k = prod_{i<=k} c_i` and compares expected tokens with seconds, so their
size counts, not only their order. For slot 1, then 2, and so on, one temperature for the slot's confidence logit is
searched on a grid so that the expected calibration error (ECE) of `a_k` is least, with the slots before fixed.
A temperature keeps the order of a slot's confidences: their AUC stays, the ECE of the products falls.
"""

from dataclasses import dataclass

import numpy as np


ECE_BINS = 15
GRID = np.exp(np.linspace(np.log(0.2), np.log(8.0), 149))  # relative steps of 2.5 %, 1.0 about in the middle
LEAST_ROUNDS = 200  # to fit at all
LEAST_OUTCOMES = 20  # of either kind; a slot with fewer keeps temperature 1


@dataclass
class Rounds:
    """Verified rounds of the `fixed` schedule, one row each.

    Attributes:
        logits: `[N, G]` confidence logits before any temperature; NaN where a draft was cut.
        accepted: `[N]` drafts accepted.
    """

    logits: np.ndarray
    accepted: np.ndarray

    def __len__(self) -> int:
        return len(self.accepted)

    def seen(self, slot: int) -> np.ndarray:
        """`[N]`: rounds in which a slot was drafted and verified."""
        return ~np.isnan(self.logits[:, slot])

    def survived(self, slot: int) -> np.ndarray:
        """`[N]`: rounds whose drafts up to and with this slot were accepted, the event `a_k` is the probability of."""
        return self.accepted > slot

    def products(self, temperatures) -> np.ndarray:
        """`a_k` `[N, G]` under temperatures, one a slot."""
        return sigmoid(self.logits / np.asarray(temperatures)).cumprod(axis=1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def ece(probability: np.ndarray, event: np.ndarray, bins: int = ECE_BINS) -> float:
    """Expected calibration error: mean distance of predicted and observed frequency over bins of equal width."""
    place = np.minimum((probability * bins).astype(int), bins - 1)
    gap = np.bincount(place, probability - event, bins)
    return float(np.abs(gap).sum() / max(1, len(probability)))


def noise_floor(probability: np.ndarray, repeats: int = 200, seed: int = 0) -> tuple[float, float]:
    """ECE that a perfect predictor has at this sample, mean and standard deviation: events drawn from the predicted
    probabilities themselves."""
    generator = np.random.default_rng(seed)
    draws = [ece(probability, generator.random(len(probability)) < probability) for _ in range(repeats)]
    return float(np.mean(draws)), float(np.std(draws))


def fit_temperatures(rounds: Rounds) -> list[float]:
    """Temperatures `[G]` by sequential temperature scaling, slot after slot.

    The ECE of a few thousand rounds is noisy, so its lowest point is not taken as it comes: of the temperatures within
    one standard deviation of the least error (that of a perfect predictor's error here), the one nearest to 1.

    Raises:
        ValueError: when there are too few rounds to fit even the first slot.
    """
    if len(rounds) < LEAST_ROUNDS:
        raise ValueError(
            f"{len(rounds)} rounds to fit on are too few, {LEAST_ROUNDS} is the least and 2,000 are better: give more "
            "prompts (half of them fit), or a larger `--max-new-tokens`."
        )
    temperatures: list[float] = []
    before = np.ones(len(rounds))
    for slot in range(rounds.logits.shape[1]):
        seen = rounds.seen(slot)
        logit, event, prefix = rounds.logits[seen, slot], rounds.survived(slot)[seen], before[seen]
        best = 1.0
        if LEAST_OUTCOMES <= event.sum() <= len(event) - LEAST_OUTCOMES:
            errors = np.array([ece(prefix * sigmoid(logit / t), event) for t in GRID])
            _, spread = noise_floor(prefix * sigmoid(logit / GRID[errors.argmin()]), repeats=50)
            close = np.flatnonzero(errors <= errors.min() + spread)
            best = float(GRID[close[np.abs(np.log(GRID[close])).argmin()]])
        temperatures.append(round(best, 4))
        before = before * sigmoid(rounds.logits[:, slot] / temperatures[-1])
    return temperatures


def assess(rounds: Rounds, temperatures: list[float]) -> dict:
    """Calibration of rounds that were not fitted on, per slot, before (`1.0`) and after.

    Returns:
        Lists over slots: `rounds`, `survived` (share), `ece_before`, `ece_after`, `noise_floor` (of the calibrated
        probabilities), `auc_before`, `auc_after` (of `c_k` among rounds that reached slot k; `None` without both
        outcomes), and means of the three errors.
    """
    from sklearn.metrics import roc_auc_score

    slots = rounds.logits.shape[1]
    raw, calibrated = rounds.products([1.0] * slots), rounds.products(temperatures)
    result: dict = {name: [] for name in ("rounds", "survived", "ece_before", "ece_after", "noise_floor")}
    result |= {"auc_before": [], "auc_after": []}
    for slot in range(slots):
        seen, event = rounds.seen(slot), rounds.survived(slot)
        result["rounds"].append(int(seen.sum()))
        result["survived"].append(float(event[seen].mean()) if seen.any() else None)
        result["ece_before"].append(ece(raw[seen, slot], event[seen]))
        result["ece_after"].append(ece(calibrated[seen, slot], event[seen]))
        result["noise_floor"].append(noise_floor(calibrated[seen, slot])[0])
        reached = seen & (rounds.accepted >= slot)
        both = 0 < event[reached].sum() < reached.sum()
        for name, temperature in (("auc_before", 1.0), ("auc_after", temperatures[slot])):
            confidence = sigmoid(rounds.logits[reached, slot] / temperature)
            result[name].append(float(roc_auc_score(event[reached], confidence)) if both else None)
    for name in ("ece_before", "ece_after", "noise_floor"):
        result[f"mean_{name}"] = float(np.mean(result[name]))
    return result


def reliability_diagram(regimes: dict[str, tuple[Rounds, list[float]]], path) -> None:
    """Predicted against observed prefix survival, before and after, all slots together, a row of panels a regime.

    Args:
        regimes: sampling temperature to held-out rounds and fitted temperatures.
        path: the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4 * len(regimes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(regimes), 2, squeeze=False)
    for row, (regime, (rounds, temperatures)) in zip(panels, regimes.items()):
        name = "greedy" if float(regime) == 0 else f"temperature {regime}"
        slots = rounds.logits.shape[1]
        for panel, title, scales in zip(row, ("before", "after"), ([1.0] * slots, temperatures)):
            products = rounds.products(scales)
            panel.plot([0, 1], [0, 1], color="0.6", linewidth=1)
            for slot in range(slots):
                seen = rounds.seen(slot)
                place = np.minimum((products[seen, slot] * 10).astype(int), 9)
                count = np.bincount(place, minlength=10)
                shown = count >= 10
                predicted = np.bincount(place, products[seen, slot], 10)[shown] / count[shown]
                observed = np.bincount(place, rounds.survived(slot)[seen], 10)[shown] / count[shown]
                panel.plot(predicted, observed, marker="o", markersize=3, linewidth=1, label=f"slot {slot + 1}")
            panel.set(title=f"{name}, {title} scaling", xlabel="predicted prefix survival", ylabel="observed")
            panel.set(xlim=(0, 1), ylim=(0, 1))
        row[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
