"""Images that are decoded, augmented, held or normalised on the training device."""
