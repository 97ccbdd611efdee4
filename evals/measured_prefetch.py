"""What a timed policy that prefetches is given: its predictor, and what the host's profile says about the window.

policies = [policy for policy in sheet.values() if is_timed(policy)]
trained = trained_predictors("results/predictors/reference", policies)      # kind: its file
ahead = Ahead("results/predictors/reference", model_hash, host, geometry)
engine.use(policy, completion="real", **ahead.of(policy, opened, "sdcard", slots=64))
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from engine.errors import UserError, error
from engine.geometry import Geometry
from engine.host_times import Host
from engine.offload_model import OpenModel
from engine.policies import Policy
from engine.predictors import TRAINED, Predictor, make_predictor
from engine.timing import Timing


def is_timed(policy: Policy) -> bool:
    """Whether a policy can run, and is more than a control of the simulator's."""
    return not (policy.clairvoyant or policy.in_place or policy.prefetch == "random")


def trained_predictors(folder: str | None, policies: list[Policy]) -> dict[str, Path]:
    """By kind the file of every trained predictor that is needed. UserError where there is none."""
    found = {}
    for policy in (policy for policy in policies if policy.prefetch in TRAINED):
        path = Path(folder or ".") / f"{policy.prefetch}.safetensors"
        if folder is None or not path.is_file():
            what = f"no {path}" if folder else f"policy '{policy.id}' without --predictors"
            raise error(what, f"a trained {policy.prefetch}", "train it, or leave that policy out")
        found[policy.prefetch] = path
    return found


def geometry_of(folder: str, dtype: str, expert_bytes: int | None = None) -> Geometry | None:
    """None where the family cannot be weighed: then nothing is simulated beside it. expert_bytes: of the store."""
    try:
        found = Geometry.of_config(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")), dtype=dtype)
    except UserError:
        return None
    return dataclasses.replace(found, expert_bytes=expert_bytes or found.expert_bytes)


@dataclasses.dataclass
class Ahead:
    """What policies that prefetch are used with: predictors, made once, and the window of every link and budget."""

    folder: str | None
    model_hash: str
    host: Host
    geometry: Geometry | None
    made: dict[tuple[int, str], Predictor] = dataclasses.field(default_factory=dict)

    def of(self, policy: Policy, opened: OpenModel, link: str, slots: int) -> dict:
        """For `Engine.use`; nothing of a policy that does not prefetch. UserError on a model that cannot be timed."""
        if not policy.prefetch:
            return {}
        if self.geometry is None:
            found = f"policy '{policy.id}' on a model whose times are not known"
            raise error(found, "a family that the formulas cover", "leave that policy out")
        key = id(opened), policy.prefetch
        if key not in self.made:
            self.made[key] = make_predictor(policy.prefetch, opened.attachment, self.folder, self.model_hash)
        window = Timing.of(self.host, link, self.geometry, slots).window(policy.schedule)
        return {"predictor": self.made[key], "window": window}
