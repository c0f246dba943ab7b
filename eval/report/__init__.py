"""Report of a run: one HTML page with everything in it, nothing fetched, no script."""
