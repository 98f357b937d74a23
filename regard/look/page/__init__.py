"""The HTML page of `regard look`."""
