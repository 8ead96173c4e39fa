"""What KEDA and the autoscaler of Kubernetes do with a ScaledObject of `metrics-api` triggers.

Sources: KEDA's `pkg/scalers/metrics_api_scaler.go` (GET, 200 or an error, the value at a GJSON path is a number), its
`pkg/scaling` (a trigger is active above its activation value, 0 unless given; an error scales nothing), "Scaling
modifiers", and Kubernetes' "Horizontal Pod Autoscaling" for a metric of the type AverageValue (ceil(value / target), and
no change within a tenth of it).
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_TOLERANCE = 0.1
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Get = Callable[[str], tuple[int, Any]]
"""Returns the status and the JSON of a URL."""


class ScalerError(Exception):
    """The value of a trigger cannot be read."""


def replicas(scaled_object: Mapping[str, Any], get: Get, current: int) -> int:
    """How many replicas there are after a scaling decision; `current`: how many there are now."""
    spec = scaled_object["spec"]
    least, most = spec.get("minReplicaCount", 0), spec.get("maxReplicaCount", 100)
    try:
        values = {one.get("name", ""): _value(one["metadata"], get) for one in spec["triggers"]}
    except ScalerError:
        return current
    modifiers = spec.get("advanced", {}).get("scalingModifiers")
    if modifiers is None:
        (trigger,) = spec["triggers"]
        value, metadata = values[trigger.get("name", "")], trigger["metadata"]
        target, activation = float(metadata["targetValue"]), float(metadata.get("activationTargetValue", 0))
    else:
        value = _evaluate(ast.parse(modifiers["formula"], mode="eval").body, values)
        target, activation = float(modifiers["target"]), float(modifiers.get("activationTarget", 0))
    if value <= activation and least == 0:
        return 0  # after the cooldown
    running = max(1, current)  # KEDA itself starts the first one
    if abs(1 - value / (target * running)) > _TOLERANCE:
        running = math.ceil(value / target)
    return int(min(max(running, least, 1), most))


def _value(metadata: Mapping[str, str], get: Get) -> float:
    status, found = get(metadata["url"])
    if status != 200:
        raise ScalerError(f"the API returned {status}")
    for name in metadata["valueLocation"].split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ScalerError(f"valueLocation must point to a number: {found!r}")
    return found


def _evaluate(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_evaluate(left, values), _evaluate(right, values))
    raise AssertionError(f"formula: {ast.dump(node)}")
