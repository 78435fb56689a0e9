"""The two processes of a code test: one runs the program, the other its tests. `sandbox.py` starts `main.py` twice.

    sandbox.py ──program, tests──> tests process <──calls, values──> program process
               <────verdict──────

The tests never enter the program's process. Plain data travels as JSON and is compared in the tests process. Functions
and objects of the program stay where they are; the tests get a `Remote` for each, which forwards calls, attributes,
items and operators. So a program can change only its own answers, not the verdict.

These files import nothing of ingot, because they run in an interpreter without site-packages.
"""
