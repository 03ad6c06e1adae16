"""Drafting, verification, sampling and the generation loop."""
