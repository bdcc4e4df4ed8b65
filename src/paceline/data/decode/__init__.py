"""From encoded images to the pixels of a batch in host memory: by Pillow, or by a region decoder in
C."""
