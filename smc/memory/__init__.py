"""Key/value memory of one model: pages, who holds them, and the tables of prompts. Rows in, page numbers out; nothing
about particles.

A page holds one token position, so no two rows ever share a half-filled one: what shares a past points to the same
pages."""
