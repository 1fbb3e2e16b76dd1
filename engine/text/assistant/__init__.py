"""What a model writes in its turn besides plain words: thoughts, and calls of tools."""
