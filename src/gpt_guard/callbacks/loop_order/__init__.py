"""LoopOrder: the calls around a step, and whether they come in a legal order."""
