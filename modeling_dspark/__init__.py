"""The drafter model. `from dspark.modeling_dspark import DSparkConfig, DSparkModel`."""

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkModel


__all__ = ["DSparkConfig", "DSparkModel"]
