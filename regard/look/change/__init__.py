"""What a model would do if a part of it did otherwise."""
