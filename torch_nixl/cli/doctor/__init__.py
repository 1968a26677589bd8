"""What `torch-nixl doctor` looks at and what it says about it; works without typer and rich.

`examine.examine` returns a `report.Report`. What could crash or hang is tried in child processes
with deadlines (`worker`), so that a broken set-up is a finding and never a traceback.
"""

from typing import Final

DEFAULT_PORT: Final = 29470
"""Where a doctor serves for another host's."""
