"""SVRG and HALP, variance reduction in full and low precision; see docs/field/halp.md."""
