"""Target and draft models as Flax linen modules."""
