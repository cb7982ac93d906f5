"""Which operators and torch functions deferred logits record, compute or refuse, by name."""

from __future__ import annotations

# torch functions, which Dynamo or a left operand route past the operators: name -> operator
COMMUTING = {"mul": "__mul__", "multiply": "__mul__", "__mul__": "__mul__", "__rmul__": "__mul__"}
COMMUTING |= {"add": "__add__", "__add__": "__add__", "__radd__": "__add__"}
RECORDED = COMMUTING | {"div": "__truediv__", "divide": "__truediv__", "__truediv__": "__truediv__"}
RECORDED |= {"tanh": "tanh", "flatten": "flatten", "reshape": "reshape"}
AUGMENTED = ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"]
COMPUTED = ["__sub__", "__rsub__", "__rtruediv__", "__matmul__", "__rmatmul__", "__pow__", "__mod__"]
COMPUTED += ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]
COMPUTED += ["__neg__", "__abs__", "__bool__", "__iter__", "__array__"]
