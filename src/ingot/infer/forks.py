"""Models in forked processes, such as the workers of a server that loads a model before it forks them."""

import functools
import os

import torch


@functools.cache
def allow_forks() -> None:
    """Let processes that are forked from this one from now on compute with one thread, as torch's data loaders do.

    A fork copies the state of OpenMP's threads without the threads, so a parallel loop would wait for them for ever.
    """
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
