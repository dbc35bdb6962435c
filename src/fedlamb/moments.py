"""First and second moments: exponential means of gradients and of their squares.

No bias correction anywhere, as in the paper.
"""

from .trees import Scalar, Tree, lerp, lerp_square


def ema(mean: Tree, value: Tree, beta: Scalar) -> Tree:
    """beta * mean + (1 - beta) * value"""
    return lerp(mean, value, 1 - beta)


def ema_of_square(mean: Tree, value: Tree, beta: Scalar) -> Tree:
    """beta * mean + (1 - beta) * value^2"""
    return lerp_square(mean, value, 1 - beta)
