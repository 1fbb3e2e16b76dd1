"""The end of a step: from hidden states to tokens and their scores."""
