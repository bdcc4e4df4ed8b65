"""Number formats: what is computed, kept and sent in which precision, and whether it is finite."""
