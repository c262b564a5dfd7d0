"""How traces with a big model's shape are made: narrow MoEs of many layers and experts, trained, listened to.

    pack ──tokens──► train ──model──► record ──trace──► compact, facts ──► predictors

A small model routes as a big one does only where its router was trained, its load is even, and its text is
not its own greedy loop. So every trace comes with its load entropy, what a cache that never changes would
hit, and how its tokens came about. Two flavours: *natural*, as training leaves it, and *matched*, whose LRU
hits are those published for big models, by terms of the training loss that say so in its name and its card,
on kinds of text that a small model becomes as sure of as it has to be for its routing to be foreseen.
"""
