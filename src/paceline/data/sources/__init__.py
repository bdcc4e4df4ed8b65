"""Labelled images by index, whatever they are stored in."""
