"""What skip connections learn, and an optimizer's settings for each parameter.

For fairseq's models and for vision.
"""

from .coefficients import UnmovedCoefficients, learned, without_decay
from .settings import ParameterSettings, check_lr_scale, parameter_settings

__all__ = [
    "ParameterSettings",
    "UnmovedCoefficients",
    "check_lr_scale",
    "learned",
    "parameter_settings",
    "without_decay",
]
