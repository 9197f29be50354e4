"""Starts smg with the flags given, and with the keys in CONTROL_KEY and, if calls need one, API_KEY. They are passed on
within the process: arguments are in every list of processes."""

import os
import sys

from smg.launch_router import launch_router, parse_router_args

# Without this key, anyone who reaches the port could register workers.
flags = [*sys.argv[1:], f"--control-plane-api-keys=chart:chart:admin:{os.environ['CONTROL_KEY']}"]
if key := os.environ.get("API_KEY"):
    flags.append(f"--api-key={key}")
launch_router(parse_router_args(flags))
