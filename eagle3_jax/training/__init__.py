"""Training: data made by the target, the training-time test loss, the trainer, the measurement."""
