"""One HTML page a run, for people: everything in it, nothing fetched, no script."""
