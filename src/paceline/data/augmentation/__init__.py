"""From an image to the square that the model takes."""
