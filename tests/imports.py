"""What a fresh process must not import."""

import subprocess
import sys


def assert_not_imported(code: str, *modules: str, argument: str = "") -> None:
    """Run the code by itself (`sys.argv[1]` is the argument): none of these modules may be there at its end."""
    after = f"import sys\n{code}\nassert not {set(modules)} & sys.modules.keys(), sys.modules.keys() & {set(modules)}"
    subprocess.run([sys.executable, "-c", after, argument], check=True)
