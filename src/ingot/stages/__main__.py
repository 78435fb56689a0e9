"""`python -m ingot.stages`: the process of one stage (`child.py`).

Processes that a stage starts (`corpus/runners/local_runner.py`) import its main module again, unless its name is
`__main__`. So they spare the half second that the imports of `child.py` take.
"""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends without a traceback

from ingot.stages.child import main

sys.exit(main())
