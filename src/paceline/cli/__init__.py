"""The command line `paceline`: its commands and exit codes.

Commands import packages only when they need them.
"""
