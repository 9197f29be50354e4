"""The HTTP port: OpenAI's API, Anthropic's messages and vLLM's tokenization. Bodies become requests of the library; its
answers and errors become responses and events."""
