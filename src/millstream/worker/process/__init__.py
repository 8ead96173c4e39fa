"""Worker processes and their supervisor."""
