"""Images that live, are decoded or are augmented on the training device."""
