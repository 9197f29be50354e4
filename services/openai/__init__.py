"""OpenAI's terms and the library's types: bodies to requests, answers to responses and events, errors. Knows no
servers, no files."""
