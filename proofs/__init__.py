"""Experiments with known answers: every learning method on a problem that is small enough to know the optimum.

A proof is a file of this package, with arms that must pass their gates and control arms that must fail one. A control
runs the same code with one thing broken, which shows that the gates can fail. `python -m proofs` (`make proofs`) runs
the proofs and writes the table.
"""
