"""The configuration of a run: Hydra composes it from YAML, a dataclass receives it, checked as a whole.

`schema` explains every setting, `compose` and `loading` make it from a command line, `limits` refuses what cannot run,
`keys` tells which settings change numbers, `numerics` turns it into number types. The YAML files are in `hydra_tree`.
"""

from cdp_repro.config.errors import ConfigError
from cdp_repro.config.loading import load_config
from cdp_repro.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config"]
