"""The strategy `asynchronous`: asynchronous SGD with bounded staleness."""
