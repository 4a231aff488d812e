"""Step 5: what a file stores for a module -> A [rank, a_width] and B [b_width, rank] in float32.

`products` has one function for every algorithm, exact up to rounding: delta = B @ A is what the trainer meant.
`ranks` makes the same delta with fewer ranks, and cuts it where a caller allows that.
"""
