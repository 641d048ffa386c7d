"""Card template and published checkpoints: one folder each, exactly as it is pushed."""
