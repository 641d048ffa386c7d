"""Training rows: what `dspark regenerate` wrote, or conversations of any source, checked row by row."""

import json
import os
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dspark.training.conversations import ConversationError, encode


SHOWN = 3  # line numbers named for each kind of fault


class Rows(Dataset):
    """Token ids and assistant masks in memory, one row a conversation."""

    def __init__(self, rows: list[tuple[list[int], list[int]]], skipped: "Skipped | None" = None):
        self.rows = [
            (torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.int8)) for ids, mask in rows
        ]
        self.skipped = skipped or Skipped()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids, mask = self.rows[i]
        return {"input_ids": ids.long(), "assistant_masks": mask.long()}

    def split(self, fraction: float, seed: int = 0) -> tuple["Rows", "Rows"]:
        """Disjoint `(rest, held out)`, the latter of at least one row."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        if len(self) < 2:
            raise ValueError("`--eval_fraction` needs at least two rows.")
        count = min(len(self) - 1, max(1, round(fraction * len(self))))
        parts = Rows([]), Rows([])
        parts[0].rows = [self.rows[i] for i in sorted(order[count:])]
        parts[1].rows = [self.rows[i] for i in sorted(order[:count])]
        parts[0].skipped = self.skipped
        return parts

    @property
    def checksum(self) -> str:
        """Of all ids and masks, in order."""
        value = 0
        for ids, mask in self.rows:
            value = zlib.crc32(mask.numpy().tobytes(), zlib.crc32(ids.numpy().tobytes(), value))
        return f"{value:08x}"

    @property
    def supervised_tokens(self) -> int:
        return sum(int(mask.sum()) for _, mask in self.rows)

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each id is a label, `[V]`."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for ids, mask in self.rows:
            counts += torch.bincount(ids[mask.bool()].long(), minlength=vocab_size)
        return counts


class Skipped:
    """Rows that were left out, counted by reason, the first few of each named by line."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.lines: dict[str, list[str]] = {}

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        self.lines.setdefault(reason, []).append(where)

    def __str__(self) -> str:
        parts = []
        for reason, count in self.counts.most_common():
            places = ", ".join(self.lines[reason][:SHOWN]) + (", ..." if count > SHOWN else "")
            parts.append(f"{count} {'row' if count == 1 else 'rows'}: {reason} ({places})")
        return "; ".join(parts)


def read_rows(paths, tokenizer, vocab_size: int, max_length: int) -> Rows:
    """The usable rows of JSONL files; what cannot be used is counted in `rows.skipped`, never dropped unsaid.

    A line is `{"input_ids", "assistant_masks"}` (as `dspark regenerate` writes it), or `{"messages"}` with assistant
    turns, which goes through the tokenizer's chat template.

    Args:
        paths: one file or several.
        max_length: longer rows are left out.

    Raises:
        ValueError: when a file is not there or no row can be used.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    rows, skipped = [], Skipped()
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"`--train-file` {path}: no such file; `dspark regenerate` makes one.")
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path.name}:{number}"
                try:
                    row = json.loads(line)
                    rows.append(row_tokens(row, tokenizer, vocab_size, max_length))
                except (json.JSONDecodeError, RecursionError):
                    skipped.add("not JSON", where)
                except ConversationError as error:
                    skipped.add(str(error), where)
    if not rows:
        raise ValueError(f"no usable row in {', '.join(map(str, paths))}: {skipped or 'the files are empty'}.")
    return Rows(rows, skipped)


def row_tokens(row, tokenizer, vocab_size: int, max_length: int) -> tuple[list[int], list[int]]:
    """Ids and mask of one row.

    Raises:
        ConversationError: says why the row cannot be used.
    """
    if not isinstance(row, dict):
        raise ConversationError("not an object")
    if "input_ids" in row:
        ids, mask = row["input_ids"], row.get("assistant_masks")
        if not (is_numbers(ids) and is_numbers(mask) and len(ids) == len(mask)):
            raise ConversationError("`input_ids` and `assistant_masks` are not two lists of one length")
    else:
        messages = row.get("messages")
        if not (isinstance(messages, list) and messages and all(is_message(message) for message in messages)):
            raise ConversationError("neither `input_ids` nor `messages` of role and content")
        if tokenizer is None or tokenizer.chat_template is None:
            raise ConversationError("`messages`, but the target's tokenizer has no chat template")
        ids, mask = encode(tokenizer, messages)
    if not any(mask):
        raise ConversationError("no assistant turn")
    if not any(a and b for a, b in zip(mask[1:], mask[2:])):
        raise ConversationError("an assistant turn of one token: nothing to predict behind it")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ConversationError("tokens of another vocabulary")
    if len(ids) > max_length:
        raise ConversationError(f"longer than the limit of {max_length} tokens")
    return ids, [int(bool(m)) for m in mask]


def is_message(message) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def is_numbers(values) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) for value in values)
