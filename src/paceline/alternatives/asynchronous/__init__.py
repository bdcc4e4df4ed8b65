"""The training strategy `asynchronous`: asynchronous SGD with bounded staleness."""
