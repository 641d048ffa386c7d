"""Prompts to regenerate: a JSONL file, or a dataset of the Hub whose user messages are taken."""

from pathlib import Path

from dspark.evaluation.inputs import read_prompts


PROMPT_COLUMNS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")


def user_turns(row: dict, column: str | None = None) -> list[str] | None:
    """The user messages of a dataset's row, by the usual names of columns; `None` when it has none."""
    names = [column] if column else PROMPT_COLUMNS
    value = next((row[name] for name in names if row.get(name)), None)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return value
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        turns = [
            turn.get("content", turn.get("value"))
            for turn in value
            if turn.get("role", turn.get("from")) in ("user", "human")
        ]
        return turns if turns and all(isinstance(turn, str) for turn in turns) else None
    return None


def load_prompts(source: str, split: str = "train", column: str | None = None, limit: int | None = None) -> list[dict]:
    """Prompts of a JSONL file, or of a dataset of the Hub: `{"turns": [...]}` each.

    Raises:
        ValueError: for a file or a row that holds no prompt; names the row.
    """
    if Path(source).is_file() or source.endswith(".jsonl"):
        return read_prompts(source, limit)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"`--prompts` {source} is no file, so it is taken for a dataset, which needs: pip install datasets"
        ) from error
    rows = load_dataset(source, split=split)
    rows = rows if limit is None else rows.select(range(min(limit, len(rows))))
    prompts = []
    for number, row in enumerate(rows):
        turns = user_turns(row, column)
        if turns is None:
            raise ValueError(
                f"`--prompts` {source}, row {number}: no user message in the columns {sorted(row)}. Name the column "
                "with `--prompt-column`."
            )
        prompts.append({"turns": turns})
    return prompts
