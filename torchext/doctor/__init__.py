"""What this machine and this environment offer to torchext: each thing really tried, and how to get what lacks.

>>> from torchext.doctor import default_probes, examine
>>> findings = examine(default_probes())
>>> findings[0].name
'python'
"""

from torchext.doctor.findings import Absent, Finding, Probe, examine
from torchext.doctor.probes import default_probes

__all__ = ["Absent", "Finding", "Probe", "default_probes", "examine"]
