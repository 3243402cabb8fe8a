"""The configuration of a run: Hydra composes it from YAML, a dataclass receives it, checked as a whole.

`schema` explains every setting. `overrides` reads a command line, `unknown_names` finds the names in it that do not
exist, `compose` lets Hydra put together what `source` finds (our YAML files are in `hydra_tree`), `loading` gives every
value its type, `limits` refuses what cannot run. `keys` tells which settings change numbers, `numerics` turns a
configuration into number types.
"""

from cdp_repro.config.errors import ConfigError
from cdp_repro.config.loading import load_config
from cdp_repro.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config"]
