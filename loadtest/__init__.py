"""An open-loop load generator for the service, with measurements and checks.

It is a client: it knows the public API and the metrics page, and nothing about decoding.
"""
