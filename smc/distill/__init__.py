"""Distillation: trains a draft for any target on conversations that the target writes itself."""
