"""An open-loop load generator for the service: when requests come, what they ask, what was measured, and whether that
was good enough.

It is a client like any other: it knows the public API and the metrics page, and nothing about how answers are decoded.
"""
