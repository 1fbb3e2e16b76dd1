"""From hidden states to embeddings: what a pooled request asks for, and what it is given."""
