"""`DSparkTrainer`: the host's Trainer with a frozen target beside the drafter and the DSpark loss (eq. 9-12).

    trainer = DSparkTrainer(model=drafter, target=target, args=args, train_dataset=rows, eval_dataset=held_out)
    trainer.train()

A row is `{"input_ids": [...], "assistant_masks": [...]}`. Every checkpoint folder is a drafter that loads with
`AutoModel.from_pretrained(..., trust_remote_code=True)`.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from dspark.training.attention import NAME as BLOCK_ATTENTION
from dspark.training.attention import BlockLayout
from dspark.training.blocks import Blocks, sample_anchors, slot_weights
from dspark.training.frozen_target import FrozenTarget
from dspark.training.losses import LossWeights, SlotLaws, SlotTerms, slot_loss
from dspark.training.metrics import Metrics, block_metrics, confidence_metrics, flatten


logger = logging.get_logger(__name__)

NO_MASKS = (
    "rows have no `assistant_masks` as long as their `input_ids`: give {'input_ids': [...], 'assistant_masks': [...]} "
    "with 1 on the tokens the target wrote (`dspark regenerate` and `dspark.training.read_rows` make them)."
)


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """The host's arguments with DSpark's own. Other defaults: columns are kept, DDP looks for no unused parameters."""

    num_anchors: int = field(default=512, metadata={"help": "Anchors of a sequence, at most (DeepSpec recipe: 512)."})
    loss_weight_ce: float = field(default=0.1, metadata={"help": "alpha_ce of eq. 12."})
    loss_weight_tv: float = field(default=0.9, metadata={"help": "alpha_tv of eq. 12."})
    loss_weight_confidence: float = field(default=1.0, metadata={"help": "alpha_conf of eq. 12."})
    loss_gamma: float | None = field(
        default=None,
        metadata={"help": "Decay of the slots' weights (eq. 9-11); by default the block size. DeepSpec's recipe: 4."},
    )
    logits_per_chunk: int | None = field(
        default=None, metadata={"help": "Draft logits held at once; by default 2**22 on CPU, 2**26 elsewhere."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "The loss needs the assistant mask."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "All parameters are used."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_anchors", "loss_gamma", "logits_per_chunk"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"`{name}` is {value}: give a positive number.")
        for name in ("loss_weight_ce", "loss_weight_tv", "loss_weight_confidence"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` is {getattr(self, name)}: give 0 to switch the term off, or more.")
        # The context enters every layer beside its input, which the reentrant variant does not see.
        self.gradient_checkpointing_kwargs = {"use_reentrant": False, **(self.gradient_checkpointing_kwargs or {})}

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(self.loss_weight_ce, self.loss_weight_tv, self.loss_weight_confidence, self.loss_gamma)


class ConversationCollator:
    """Pads rows on the right: `input_ids` and `assistant_masks`, both `[B, S]`."""

    def __init__(self, pad_token_id: int = 0):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        for row in rows:
            if "assistant_masks" not in row or len(row["assistant_masks"]) != len(row["input_ids"]):
                raise ValueError(NO_MASKS)
        lengths = [len(row["input_ids"]) for row in rows]
        ids = torch.full((len(rows), max(lengths)), self.pad_token_id)
        masks = torch.zeros_like(ids)
        for i, (row, length) in enumerate(zip(rows, lengths)):
            ids[i, :length] = torch.as_tensor(row["input_ids"])
            masks[i, :length] = torch.as_tensor(row["assistant_masks"])
        return {"input_ids": ids, "assistant_masks": masks, "lengths": torch.tensor(lengths)}


class EpochOfAnchors(TrainerCallback):
    """Tells the trainer which epoch its anchors are of; after a resume too."""

    def __init__(self, trainer: "DSparkTrainer"):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.anchor_epoch = int((state.epoch or 0) + 1e-6)


class DSparkTrainer(Trainer):
    """Trains a drafter on a frozen target.

    Args:
        model: the [`DSparkModel`], or a `PeftModel` around it.
        target: the causal LM it drafts for, on the device it shall run on.
        kwargs: the host's; `data_collator` by default pads conversations.

    Raises:
        ValueError: when target and drafter do not fit, or rows have no assistant mask.
    """

    def __init__(self, model=None, args: DSparkTrainingArguments | None = None, *, target: nn.Module, **kwargs):
        if not isinstance(args, DSparkTrainingArguments | None):
            raise TypeError(f"`args` is a {type(args).__name__}: give DSparkTrainingArguments.")
        args = args or DSparkTrainingArguments(output_dir="dspark_drafter")
        kwargs.setdefault("data_collator", ConversationCollator())
        self.anchor_epoch = 0
        self._metrics, self._eval_metrics = Metrics(), Metrics()
        drafter = drafter_of(model)
        for module in (drafter.embed_tokens, drafter.lm_head):
            if module is not None:
                module.requires_grad_(False)
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the window's sum of weights
        self.drafter = drafter
        self.frozen = FrozenTarget(target, drafter)
        self.loss_weights = args.loss_weights
        self.add_callback(EpochOfAnchors(self))

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "assistant_masks"]

    # ---- anchors and denominators ------------------------------------------------------------------------------

    def blocks_of(self, inputs: dict[str, torch.Tensor], epoch: int) -> Blocks:
        """The blocks of a batch, drawn for an epoch."""
        if "assistant_masks" not in inputs:
            raise ValueError(NO_MASKS)
        ids, masks = inputs["input_ids"].cpu().numpy(), inputs["assistant_masks"].cpu().numpy()
        anchors = [
            sample_anchors(row[:length].astype(np.int64), mask[:length], self.args.num_anchors, self.args.seed, epoch)
            for row, mask, length in zip(ids, masks, inputs["lengths"].tolist())
        ]
        return Blocks.of(inputs["assistant_masks"].cpu(), anchors, self.drafter.config.block_size)

    def denominators(self, blocks: Blocks, ids: torch.Tensor) -> torch.Tensor:
        """Sums of slot weights, `[2]`: over labels in the draft vocabulary (for CE), over all supervised slots."""
        weights = slot_weights(blocks.supervised, self.gamma).double()
        kept = self.drafter.kept_ids
        inside = weights
        if kept is not None:
            inside = weights * torch.isin(blocks.tokens(ids.cpu(), 1), kept.cpu())
        return torch.stack([inside.sum(), weights.sum()])

    @property
    def gamma(self) -> float:
        return self.loss_weights.gamma or self.drafter.config.block_size

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The host's, with the sums of weights of the whole accumulation window, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            batch["blocks"] = self.blocks_of(batch, self.anchor_epoch)
            total += self.denominators(batch["blocks"], batch["input_ids"])
        return batches, self.accelerator.reduce(total.float().to(device), reduction="sum").double()

    # ---- the loss ----------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Eq. 12 over the batch's blocks, divided by `num_items_in_batch`: `denominators` of the window."""
        blocks = inputs.get("blocks")
        if blocks is None:
            blocks = self.blocks_of(inputs, epoch=0)
        if num_items_in_batch is None:
            num_items_in_batch = self.denominators(blocks, inputs["input_ids"])
        if not model.training:
            metrics, scale = self._eval_metrics, 1
        else:
            metrics, scale = self._metrics, self.accelerator.num_processes  # DDP takes the mean of the gradients
        with self.accelerator.autocast():
            loss = self.loss_of(model, inputs["input_ids"], blocks, num_items_in_batch, metrics)
        return (loss * scale, {}) if return_outputs else loss * scale

    def loss_of(self, model, ids, blocks: Blocks, denominators: torch.Tensor, metrics: Metrics) -> torch.Tensor:
        """The loss of sequences `[B, S]` at given blocks; adds what it sees to `metrics`."""
        drafter, link = self.drafter, self.frozen.link
        device = drafter.device
        ids, blocks = ids.to(device), blocks.to(device)
        features, states = self.frozen.run(ids, device)
        if not (torch.isfinite(features).all() and torch.isfinite(states).all()):
            raise ValueError(
                f"the target's hidden states hold NaN or infinity in {self.frozen.dtype}: load it in bfloat16."
            )
        hidden = draft_hidden(model, drafter, link, features, ids, blocks)  # [B, A, G, H]
        head_features, confidence = head_outputs(drafter, hidden, blocks.tokens(ids, 0))

        # Supervised slots only, in order of the position whose state predicts their label.
        supervised = blocks.supervised.flatten()
        if not supervised.any():  # nothing of the target's in this batch
            return hidden.sum() * 0.0 + sum(p.sum() * 0.0 for p in drafter.parameters() if p.requires_grad)
        rows = blocks.rows(ids.shape[1]).flatten()
        chosen = supervised.nonzero().squeeze(1)
        chosen = chosen[rows[chosen].argsort(stable=True)]

        def take(tensor):
            return None if tensor is None else tensor.flatten(0, 2)[chosen]

        weights = slot_weights(blocks.supervised, self.gamma).flatten()[chosen]
        weight_ce, weight_all = (weights / total for total in denominators.to(device).float().clamp(min=1e-12))
        markov = drafter.markov_head
        laws = SlotLaws(
            self._draft_logits,
            link.target_logits,
            states.flatten(0, 1),
            rows[chosen],
            blocks.tokens(ids, 1).flatten()[chosen],
            drafter.config.vocab_size,
            drafter.kept_ids,
            self.args.logits_per_chunk or (2**22 if device.type == "cpu" else 2**26),
        )
        loss, terms = slot_loss(
            laws,
            self.loss_weights.ce * weight_ce,
            self.loss_weights.tv * weight_all,
            take(hidden),
            take(head_features),
            [] if markov is None else list(markov.markov_w2.parameters()),
        )
        logits = take(confidence)
        if logits is not None:
            # The label is detached (eq. 8, 11); the gradient reaches the backbone through the head's input.
            bce = nn.functional.binary_cross_entropy_with_logits(logits, terms.acceptance, reduction="none")
            loss = loss + self.loss_weights.confidence * (weight_all * bce).sum()
            metrics.add("loss_confidence", (weights * bce).sum(), weights.sum())
        self._count(metrics, blocks, chosen, weights, terms, logits)
        return loss

    def _draft_logits(self, hidden: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        logits = self.frozen.link.base_logits(self.drafter, hidden)
        return logits if features is None else logits + self.drafter.markov_head.markov_w2(features).float()

    @torch.no_grad()
    def _count(self, metrics: Metrics, blocks: Blocks, chosen, weights, terms: SlotTerms, confidence) -> None:
        inside = weights * terms.inside
        metrics.add("loss_ce", (inside * terms.ce).sum(), inside.sum())
        metrics.add("loss_tv", (weights * terms.tv).sum(), weights.sum())
        metrics.add("labels_in_vocabulary", terms.inside.sum(), torch.tensor(len(chosen), device=chosen.device))
        shape = blocks.supervised.shape
        acceptance = torch.zeros(shape.numel(), device=chosen.device).index_put_((chosen,), terms.acceptance)
        match = torch.zeros(shape.numel(), dtype=torch.bool, device=chosen.device).index_put_((chosen,), terms.match)
        block_metrics(metrics, acceptance.view(shape), match.view(shape), blocks.supervised)
        if confidence is not None:
            confidence_metrics(metrics, confidence.sigmoid(), terms.acceptance)

    # ---- logging and evaluation --------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs and self._metrics:
            logs |= flatten(self._metrics.reduce(self.accelerator))
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """The host's, with metrics over all blocks; `loss` is eq. 12 with denominators over the whole set."""
        self._eval_metrics = Metrics()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = flatten(self._eval_metrics.reduce(self.accelerator), f"{metric_key_prefix}_")
        terms = {"ce": self.loss_weights.ce, "tv": self.loss_weights.tv, "confidence": self.loss_weights.confidence}
        total = sum(alpha * metrics.get(f"{metric_key_prefix}_loss_{name}", 0.0) for name, alpha in terms.items())
        output.metrics.update(metrics, **{f"{metric_key_prefix}_loss": total})
        return output

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        """The host's. What a full disk leaves of a checkpoint is removed, so the one before stays the newest."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        existed = folder.exists()
        try:
            super()._save_checkpoint(model, trial)
        except OSError as error:
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"checkpoint {folder} could not be written ({error}); what there was of it is removed, earlier ones "
                "are intact. Make room, or set `--save_total_limit`, and go on with `--resume`."
            ) from error


def drafter_of(model):
    """The drafter itself, out of wrappers (PEFT)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def draft_hidden(model, drafter, link, features, ids, blocks: Blocks) -> torch.Tensor:
    """The backbone over all blocks of a batch in one pass: `[B, A, G, H]`.

    Args:
        model: what is called: the drafter, or a wrapper of it.
        features: `[B, S, T * H]`; ids: `[B, S]`.
    """
    config = drafter.config
    batch, length = ids.shape
    layout = BlockLayout(blocks.anchors, length, config.block_size, config.is_causal)
    attention = config._attn_implementation
    config._attn_implementation = BLOCK_ATTENTION
    try:
        hidden = model(
            link.embed(drafter, blocks.inputs(ids, config.mask_token_id).flatten(1)).detach(),
            features,
            position_ids=blocks.slots.flatten(1),
            attention_mask=layout.mask(None),
            layout=layout,
        ).last_hidden_state
    finally:
        config._attn_implementation = attention
    return hidden.view(batch, -1, config.block_size, config.hidden_size)


def head_outputs(drafter, hidden, previous) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Teacher-forced heads: what `W_2` projects `[B, A, G, R]`, and confidence logits `[B, A, G]`.

    Args:
        hidden: `[B, A, G, H]`; previous: `[B, A, G]` token before each slot's label.
    """
    markov, embedding, features = drafter.markov_head, None, None
    if markov is not None:
        embedding = markov.embed(previous)
        if markov.kind == "rnn":  # a state runs through the block
            state, slots = None, []
            for k in range(hidden.shape[2]):
                slot, state = markov.features(hidden[:, :, k], embedding[:, :, k], state)
                slots.append(slot)
            features = torch.stack(slots, dim=2)
        else:
            features, _ = markov.features(hidden, embedding)
    confidence = None
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_head(hidden, embedding)
    return features, confidence
