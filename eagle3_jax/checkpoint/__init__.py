"""Reading and writing checkpoints: containers, names, targets and drafts."""
