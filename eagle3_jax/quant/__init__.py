"""How weights are stored: formats, scales, layouts."""
