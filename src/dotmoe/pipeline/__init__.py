"""The commands that make models, one file each; `stages.py` has what they share."""
