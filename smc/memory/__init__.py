"""KV memory: the pools of both models, the refcounted page allocator, and the prefix cache. Knows nothing about
particles.

A page holds one token position, so that no two rows ever share a half-filled page: rows with a common beginning refer
to the same pages."""
