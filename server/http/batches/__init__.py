"""OpenAI's files and batches: requests in a file, answered at low priority, results in files."""
