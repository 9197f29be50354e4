"""Distillation: a draft for any target, trained on what the target writes to itself."""
