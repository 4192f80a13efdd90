"""Other systems, started with their own Python for a comparison: they import nothing of ours."""
