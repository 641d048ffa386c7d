"""Training: data, losses, trainer, calibration, publishing."""

from dspark.training.blocks import Blocks
from dspark.training.calibrate import calibrate
from dspark.training.data import Rows, read_rows
from dspark.training.new_drafter import new_drafter
from dspark.training.publish import publish
from dspark.training.regenerate import regenerate
from dspark.training.trainer import ConversationCollator, DSparkTrainer, DSparkTrainingArguments


__all__ = [
    "Blocks",
    "ConversationCollator",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "Rows",
    "calibrate",
    "new_drafter",
    "publish",
    "read_rows",
    "regenerate",
]
