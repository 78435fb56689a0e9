"""Experiments with known answers: each learning method on a problem small enough to know what it must come to.

A proof is a file here, with arms that must meet their gates and control arms that must not: the same code with one
thing broken, which shows that the gates can fail. `python -m proofs` (`make proofs`) runs them and writes the table.
"""
