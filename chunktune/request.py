"""What one sweep is asked to do: all that the launcher and the workers need to know. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from chunktune.spec import Spec


@dataclass(frozen=True)
class SweepRequest:
    """One sweep.

    `sources`: dotted key -> where its value came from. `spec_dir`: absolute directory of the spec file, from
    which factories import. `output_dir`: absolute, or "" where the workers settle it together. `force`: a sweep
    that is in the directory already may be overwritten. `rehearse`: no pipeline, every stage rehearses in turn.
    `resume`: the sweep in the directory goes on. `launch`: names this run of the command, restarts of its workers
    included; "" where the workers agree on a name. `share`: other sweeps may use the devices at the same time.
    """

    spec: Spec
    sources: dict[str, str]
    name: str
    spec_dir: str
    quick: bool
    output_dir: str
    force: bool = False
    rehearse: bool = False
    resume: bool = False
    launch: str = ""
    share: bool = False

    def to_json(self) -> str:
        """The request as one line of JSON, for the workers."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "spec"}
        return json.dumps({"spec": self.spec.model_dump(mode="json"), **fields}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> SweepRequest:
        """The request that `to_json` wrote. Raises ValueError or TypeError where it did not."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "spec": Spec.model_validate(fields["spec"])})
