"""Direct preference optimisation: learn from pairs of better and worse answers, with a loss of your own."""
