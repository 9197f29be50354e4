"""Key/value memory of one model: pages, reference counts, block tables. Rows in, page numbers out; nothing about particles.

A page holds one token position. Rows that share a past therefore never share a half-filled page, so forking, re-rooting and
sharing are table entries and reference counts; no key or value is ever copied.
"""
