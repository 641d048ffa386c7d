"""Training and evaluation metrics as (sum, count) pairs, reduced once over batches and processes."""

import torch


CONFIDENCE_BINS = 1024  # of the histogram that AUC is read from; ECE uses 15 of equal width, as is usual
ECE_BINS = 15


class Metrics:
    """Sums and counts by name. A metric is their quotient."""

    def __init__(self):
        self._sums: dict[str, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add a pair; both may be tensors of one shape (a metric a slot)."""
        pair = torch.stack([torch.as_tensor(total).double(), torch.as_tensor(count).double()]).detach()
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def reduce(self, accelerator) -> dict[str, torch.Tensor]:
        """Quotients over all processes; starts anew."""
        sums = {name: accelerator.reduce(pair, reduction="sum") for name, pair in self._sums.items()}
        self._sums = {}
        return {name: pair[0] / pair[1] for name, pair in sums.items() if name != HISTOGRAM} | (
            {HISTOGRAM: sums[HISTOGRAM]} if HISTOGRAM in sums else {}
        )


HISTOGRAM = "confidence_histogram"


def block_metrics(metrics: Metrics, acceptance: torch.Tensor, match: torch.Tensor, supervised: torch.Tensor) -> None:
    """What full blocks (all slots supervised) say about decoding; acceptance and match `[B, A, G]`.

    - `accepted_length`: expected tokens per target forward at temperature 1, bonus token included, teacher-forced.
    - `accepted_length_greedy`: the same when a draft is right if both models have the same most likely token.
    - `acceptance_<k>`: P(draft k accepted | those before were), temperature 1, k from 1.
    """
    full = supervised.all(dim=-1)
    count = full.sum()
    c = torch.where(full[..., None], acceptance, 0).double()
    prefix = c.cumprod(dim=-1)
    metrics.add("accepted_length", count + prefix.sum(), count)
    greedy = (match & full[..., None]).double().cumprod(dim=-1)
    metrics.add("accepted_length_greedy", count + greedy.sum(), count)
    before = torch.cat([full[..., None].double(), prefix[..., :-1]], dim=-1)
    metrics.add("acceptance", (before * c).sum(dim=(0, 1)), before.sum(dim=(0, 1)))


def confidence_metrics(metrics: Metrics, confidence: torch.Tensor, acceptance: torch.Tensor) -> None:
    """Histogram of confidences `[N]` with the acceptance (eq. 8) that came with them."""
    place = (confidence * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    rows = torch.zeros(3, CONFIDENCE_BINS, dtype=torch.float64, device=confidence.device)
    for row, values in zip(rows, (confidence, acceptance, torch.ones_like(confidence))):
        row.index_add_(0, place, values.double())
    metrics.add(HISTOGRAM, rows, rows)


def ece_and_auc(histogram: torch.Tensor) -> tuple[float, float]:
    """Expected calibration error and area under the ROC curve of confidences against fractional labels.

    Args:
        histogram: `[3, bins]` sums of confidence, of acceptance, and counts.
    """
    bins = torch.arange(histogram.shape[1], device=histogram.device) * ECE_BINS // histogram.shape[1]
    coarse = torch.zeros(3, ECE_BINS, dtype=histogram.dtype, device=histogram.device).index_add_(1, bins, histogram)
    ece = (coarse[0] - coarse[1]).abs().sum() / histogram[2].sum()
    positive, negative = histogram[1], histogram[2] - histogram[1]
    below = negative.cumsum(0) - negative
    auc = (positive * (below + 0.5 * negative)).sum() / (positive.sum() * negative.sum())
    return ece.item(), auc.item()


def flatten(values: dict[str, torch.Tensor], prefix: str = "") -> dict[str, float]:
    """Floats under one name each; slots are numbered from 1."""
    flat = {}
    for name, value in values.items():
        if name == HISTOGRAM:
            flat[f"{prefix}confidence_ece"], flat[f"{prefix}confidence_auc"] = ece_and_auc(value[0])
        elif value.dim():
            flat |= {f"{prefix}{name}_{k}": v for k, v in enumerate(value.tolist(), start=1)}
        else:
            flat[f"{prefix}{name}"] = value.item()
    return {name: value for name, value in flat.items() if value == value}  # without what nothing was counted for
