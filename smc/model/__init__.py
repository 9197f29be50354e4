"""Decoder-only transformers of the Llama 3.x, Qwen 2.5 and Qwen 3 families, loaded from Hugging Face directories."""
