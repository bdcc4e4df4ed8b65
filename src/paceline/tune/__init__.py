"""Measurements of links, all-reduces and the step of a model, from which plans are made."""
