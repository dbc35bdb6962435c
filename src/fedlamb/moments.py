"""First and second moments: exponential means of gradients and of their squares.

No bias correction anywhere, as in the paper.
"""

from .trees import Scalar, Tree, tree_map


def ema(mean: Tree, value: Tree, beta: Scalar) -> Tree:
    """beta * mean + (1 - beta) * value"""
    return tree_map(lambda a, b: a.lerp(b, 1 - beta), mean, value)


def ema_of_square(mean: Tree, value: Tree, beta: Scalar) -> Tree:
    """beta * mean + (1 - beta) * value^2"""
    return tree_map(lambda a, b: a.lerp(b * b, 1 - beta), mean, value)
