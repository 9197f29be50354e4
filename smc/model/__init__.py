"""Decoder-only transformers of the families in `smc.model.families`, loaded from Hugging Face directories."""
