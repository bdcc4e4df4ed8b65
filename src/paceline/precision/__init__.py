"""Number formats: what is computed, kept and sent in which precision."""
