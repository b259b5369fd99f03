"""Error kinds of the library, so that a caller can tell a setting to change from a machine that refuses.

Every message has three sentences: what happened with values, why it cannot work, and which field to set to what.
"""


class SettingsError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class UnknownFieldError(SettingsError, TypeError):
    """A field that the configuration does not have; a `TypeError` too, as for any unknown keyword."""


class HostMemoryError(RuntimeError):
    """The machine refused host memory, or refused to page-lock it."""


class UpstreamMovedError(RuntimeError):
    """A method of TRL, transformers or Accelerate that this library overrides no longer has the tested signature."""


class NonFiniteGradientError(RuntimeError):
    """Too many optimizer steps in a row were skipped because the gradient norm was infinite or NaN."""


class HalfSteppedError(RuntimeError):
    """An optimizer step, or the load of its state, ended midway: the weights are of different steps."""


class UnservedAttentionError(NotImplementedError):
    """The model's attention has a feature that packed rows would silently lose."""


class UnservedLayerError(NotImplementedError):
    """A layer of the model does something that a run in tiles, or a recompute without its graph, would change."""


class RankError(RuntimeError):
    """Another rank failed, died, is at another operation, or did not answer within the process group's timeout."""


class HostThreadError(RuntimeError):
    """A host thread failed at its part of the work; the error that it met is the cause."""


class ParkedError(RuntimeError):
    """Weights were used while they are parked in host memory, or could not come back from there."""


class DeviceMemoryError(RuntimeError):
    """The card holds more than `device_memory_budget` allows, or has too little free for what is to come."""


class StalePolicyError(RuntimeError):
    """vLLM's log-probs are so far from the trainer's that it must have sampled with other weights."""


class WeightSyncError(RuntimeError):
    """vLLM's weights are not the policy's."""


class ActivationGoneError(RuntimeError):
    """An activation was asked for a second time; backward had taken it and its memory was given back."""
