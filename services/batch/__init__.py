"""A file of requests in, a file of answers out: resumable, in order, on a gang that is started for it."""
