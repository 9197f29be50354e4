"""A file of requests in, a file of answers out: resumable, in order, on a worker group that is started for it."""
