"""The configuration of a run: Hydra composes it from YAML files, a dataclass receives it, checked as a whole.

`schema` explains every setting. `source` finds the YAML files (ours are in `hydra_tree`), `overrides` reads a command
line, `unknown_names` finds names in it that do not exist, `compose` lets Hydra compose files and overrides, `loading`
gives every value its type, `limits` refuses what cannot run. `known` composes faster, without these checks. `keys` says
which settings change the numbers of a run. `numerics` turns settings into number types, loss and delay method.
"""

from cdp_repro.config.errors import ConfigError
from cdp_repro.config.loading import load_config
from cdp_repro.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config"]
