"""Text, model and generation for the example of a language model."""
