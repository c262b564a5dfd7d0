"""Drafts of a whole block at once, from the target's own hidden states (DFlash, Chen et al., 2026).

shape     config.json of a checkpoint
network   attention over the text's features, and inside the block
file      a folder to a network, and back
drafter   what it hears of a text, and drafts of it
"""
